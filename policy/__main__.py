"""Entry point of the policy pack."""

from policy.pack import create_pack

create_pack()
