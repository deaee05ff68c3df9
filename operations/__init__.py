"""Day-to-day commands on a stack that exists: what still bills, and what an error of Pulumi means."""
