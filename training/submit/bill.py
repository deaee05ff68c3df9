"""The running bill of a stack, for `finetune status`: its price, and how long its GPU nodes still have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from infra.outputs import StackOutputs
from training.submit.follow import duration


def bill(target: StackOutputs, now: datetime | None = None) -> dict[str, Any]:
    """`hourly_usd` of the whole stack, `expires` as of the last ``pulumi up``, `seconds_left` (None: no expiry)."""
    left = None
    if target.expires is not None:
        left = (datetime.fromisoformat(target.expires) - (now or datetime.now(UTC))).total_seconds()
    return {"hourly_usd": target.hourly_usd, "expires": target.expires, "seconds_left": left}


def bill_words(target: StackOutputs, now: datetime | None = None) -> str:
    """The same in words."""
    price = "an unknown price" if target.hourly_usd is None else f"{target.hourly_usd:.2f} USD an hour"
    words = f"stack {target.stack}: {price} while its GPU nodes run"
    left = bill(target, now)["seconds_left"]
    if left is None:
        return f"{words}, no expiry"
    if left <= 0:
        return f"{words}; they expired at {target.expires} (finetune extend, finetune wake)"
    return f"{words}, which end in {duration(left)} (finetune extend gives more)"
