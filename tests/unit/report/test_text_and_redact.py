"""Numbers in words, and what counts as a secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.redact import REDACTED, Redactor, is_secret_key
from training.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (950, "950"), (1234, "1,234"), (27_380, "27.4k"), (999_800, "1.00M"), (52_428_800, "52.4M"),
     (1.54e9, "1.54B"), (0.0123, "0.0123"), (2e-5, "2.00e-5"), (-3.456, "-3.46"), (None, "–"),
     (float("nan"), "not finite")],
)  # fmt: skip
def test_compact(value: float | None, shown: str) -> None:
    assert text.compact(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(2e-5, "2e-5"), (20_000, "20k"), (1.5e-5, "1.5e-5"), (100, "100"), (0.5, "0.5")]
)
def test_tick(value: float, shown: str) -> None:
    assert text.tick(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "40.0 ms"), (8.146, "8.15 s"), (59.99, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"),
     (273_600, "3 d 04 h"), (None, "–")],
)  # fmt: skip
def test_duration(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (9.0, 3.87, "−57 %"),
        (2.0, 2.1, "+5.0 %"),
        (2.0, 2.0, "unchanged"),
        (0.0, 1.0, None),
        (None, 1.0, None),
    ],
)
def test_change(before: float | None, after: float | None, shown: str | None) -> None:
    assert text.change(before, after) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "$0.00"), (5.689, "$5.69"), (0.0123, "$0.012"), (1234.5, "$1,234.50")]
)
def test_usd(value: float, shown: str) -> None:
    assert text.usd(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(512, "512 B"), (18_500_000_000, "17.2 GiB"), (2.6e12, "2.36 TiB")]
)
def test_size(value: float, shown: str) -> None:
    assert text.size(value) == shown


@pytest.mark.parametrize("key", ["HF_TOKEN", "hfToken", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
                                 "password", "api-key", "WANDB_API_KEY", "client.secret", "token",
                                 "Authorization"])  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize("key", ["max_new_tokens", "tokens_per_gpu", "tokenizer", "eos_token", "key",
                                 "TOKENIZERS_PARALLELISM", "AWS_WEB_IDENTITY_TOKEN_FILE", "num_kv_heads",
                                 "supervised_tokens", "path"])  # fmt: skip
def test_keys_that_only_look_secret(key: str) -> None:
    assert not is_secret_key(key)


def test_any_key_of_the_environment_is_secret() -> None:
    assert is_secret_key("MY_KEY", in_env=True)
    assert not is_secret_key("NCCL_DEBUG", in_env=True)


@given(st.text(alphabet=st.characters(categories=["L", "N"]), min_size=8), st.text())
def test_value_of_a_secret_key_is_gone_wherever_it_recurs(secret: str, around: str) -> None:
    redactor = Redactor()
    value = {"env": {"SERVICE_TOKEN": secret}, "log": f"{around}{secret}{around}"}
    redactor.learn(value)
    cleaned = redactor.clean(value)
    assert cleaned["env"]["SERVICE_TOKEN"] == REDACTED
    if secret not in REDACTED:
        assert secret not in cleaned["log"].replace(REDACTED, "")


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "x" * 34, "AKIA" + "A1B2" * 4, "ghp_" + "a" * 36, "sk-" + "a1" * 20,
     "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
     "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_values_that_look_like_secrets(secret: str) -> None:
    assert Redactor().text(f"before {secret} after") == f"before {REDACTED} after"


def test_signed_and_credential_urls() -> None:
    cleaned = Redactor().text(
        "s3://b/k https://u:p4ss@host/x?X-Amz-Signature=abcdef&a=1 WANDB_API_KEY=123456789"
    )
    assert (
        cleaned
        == f"s3://b/k https://{REDACTED}@host/x?X-Amz-Signature={REDACTED}&a=1 WANDB_API_KEY={REDACTED}"
    )
