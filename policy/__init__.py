"""Policy pack: ``pulumi preview --policy-pack policy``."""
