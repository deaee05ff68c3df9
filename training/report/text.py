"""Numbers and durations as people read them; the report and the terminal use the same ones."""

from __future__ import annotations

import math
import re
import sys

NONE = "–"
"""What stands where there is no value."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(value: float | None) -> str:
    """A whole number with thousands separators: 1,234,567."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def compact(value: float | None) -> str:
    """A number in few characters, three of them significant: 950, 12.3k, 4.50M, 0.0123."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit * 0.9995:
            scale = 1e3 if suffix == "k" else limit
            return f"{_digits(value / scale)}{suffix}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return _digits(value)


def tick(value: float) -> str:
    """The same without trailing zeros, for round values: 20k, 2e-5."""
    shown = compact(value)
    match = re.fullmatch(r"(-?[\d,]+)(\.\d*?)0*((?:e-?\d+|[kMBT])?)", shown)
    return match[1] + match[2].rstrip(".") + match[3] if match else shown


def _digits(value: float, digits: int = 3) -> str:
    """`digits` significant digits; an exponent below a thousandth."""
    if value == 0:
        return "0"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if int(power) < -3:
        return f"{mantissa}e{int(power)}"
    return f"{value:.{max(0, digits - 1 - int(power))}f}"


def loss(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def perplexity(mean_loss: float | None) -> float | None:
    """exp of a mean loss per token in nats; None where there is no loss, or it is past what a float holds."""
    if mean_loss is None or not math.isfinite(mean_loss) or mean_loss > math.log(sys.float_info.max):
        return None
    return math.exp(mean_loss)


def change(before: float | None, after: float | None) -> str | None:
    """The relative change, signed: −57 %. None where it cannot be told."""
    if before is None or after is None or not before or not math.isfinite(before) or not math.isfinite(after):
        return None
    percent = 100 * (after - before) / abs(before)
    if abs(percent) < 0.05:
        return "unchanged"
    digits = 0 if abs(percent) >= 10 else 1
    return f"{'−' if percent < 0 else '+'}{abs(percent):,.{digits}f} %"


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def usd(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    return f"${value:,.2f}" if abs(value) >= 0.995 or value == 0 else f"${value:.3f}"


def duration(seconds: float | None) -> str:
    """40.2 ms, 0.423 s, 8.15 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if 0 < seconds < 0.1:
        return f"{_digits(1000 * seconds)} ms"
    if seconds < 59.95:
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def clock(seconds: float | None) -> str:
    """A duration of constant width for a line that is drawn over and over: 0:42, 1:05:09."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def size(num_bytes: float | None) -> str:
    """Bytes in binary units: 3.09 GiB."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    value, power = float(num_bytes), 0
    while abs(value) >= 1000 and power < len(_BINARY_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{_digits(value)} {_BINARY_UNITS[power]}" if power else f"{value:.0f} B"
