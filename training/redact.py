"""Keeps secrets out of what a run leaves behind: by the name of a key, by the look of a value, and wherever it recurs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

REDACTED = "[redacted]"

_SECRET_WORDS = frozenset(
    (
        "token", "secret", "password", "passwd", "passphrase", "pwd", "pat", "cookie", "apikey",
        "credential", "credentials", "authorization", "bearer",
    )
)  # fmt: skip
_KEYS_THAT_ARE_SECRET = frozenset(
    ("api", "access", "private", "secret", "auth", "signing", "encryption", "ssh", "license")
)
_TOKENIZER_WORDS = frozenset(
    ("pad", "eos", "bos", "unk", "mask", "sep", "cls")
)  # eos_token is a piece of text
_ENV_SECTIONS = frozenset(("env", "environment", "env_vars"))

_SECRET_VALUES = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}                                   # Hugging Face
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                           # AWS access key id
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}     # GitHub
    | \bglpat-[\w-]{16,}                                      # GitLab
    | \bsk-[A-Za-z0-9_-]{20,}                                 # model services
    | \bxox[abprs]-[\w-]{10,}                                 # Slack
    | \bpul-[a-f0-9]{40}\b                                    # Pulumi
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                       # JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)                         # user:password@ in a URL
    | (?i:(?<=X-Amz-Signature=)|(?<=X-Amz-Credential=)|(?<=X-Amz-Security-Token=))[^&\s"']+
    | (?i:(?<=bearer\s))[\w.~+/-]{12,}=*
    | \b(?i:[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY))=(?P<assigned>[^\s"'&]{6,})
    """,
    re.VERBOSE | re.DOTALL,
)


def is_secret_key(key: str, *, in_env: bool = False) -> bool:
    """Whether a key names a secret: HF_TOKEN, apiKey; not max_new_tokens, tokenizer, eos_token.

    Environment variables are judged more strictly: there, any KEY is one.
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    if len(words) == 2 and words[1] == "token" and words[0] in _TOKENIZER_WORDS:
        return False
    if words and words[-1] in ("file", "path", "dir"):  # AWS_WEB_IDENTITY_TOKEN_FILE names a place
        return False
    return (
        any(word in _SECRET_WORDS for word in words)
        or any(word in _KEYS_THAT_ARE_SECRET and after == "key" for word, after in pairwise(words))
        or (in_env and any(word in ("key", "keys", "auth", "pass") for word in words))
    )


def holds_secret(text: str) -> bool:
    """Whether a text holds something that looks like a token or a private key."""
    return _SECRET_VALUES.search(text) is not None


class Redactor:
    """Learns the secrets of a run's files (`learn`), then removes them from every text (`clean`)."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def learn(self, value: Any, *, in_env: bool = False) -> None:
        """Remembers the values that stand under secret keys."""
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                if isinstance(item, (str, int, float)) and not isinstance(item, bool):
                    if is_secret_key(str(key), in_env=in_env) and len(str(item)) >= 6:
                        self._known.add(str(item))
                else:
                    self.learn(item, in_env=str(key) in _ENV_SECTIONS)
        elif isinstance(value, (list, tuple)):
            for item in cast("list[Any]", value):
                self.learn(item, in_env=in_env)

    def clean(self, value: Any, *, in_env: bool = False) -> Any:
        """The same JSON-like value without secrets."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): self._clean_item(str(key), item, in_env)
                for key, item in cast("Mapping[Any, Any]", value).items()
            }
        if isinstance(value, (list, tuple)):
            return [self.clean(item, in_env=in_env) for item in cast("list[Any]", value)]
        return value

    def _clean_item(self, key: str, item: Any, in_env: bool) -> Any:
        scalar = isinstance(item, (str, int, float)) and not isinstance(item, bool)
        if scalar and item != "" and is_secret_key(key, in_env=in_env):
            return REDACTED
        return self.clean(item, in_env=key in _ENV_SECTIONS)

    def text(self, text: str) -> str:
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, REDACTED)
        return _SECRET_VALUES.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    assigned = match.group("assigned")
    return match.group().removesuffix(assigned) + REDACTED if assigned else REDACTED
