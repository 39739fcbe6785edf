"""Values of a checkpoint's config.json, key by key, and ConfigError."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import fields
from itertools import islice
from typing import Any


class ConfigError(ValueError):
    """A setting, a checkpoint or a request that cannot be honoured.

    The message is one sentence for the user: on one line, whatever values it quotes from a file,
    and of at most LONGEST characters.
    """

    LONGEST = 2000

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        cut = len(line) > self.LONGEST
        super().__init__(line[: self.LONGEST - 3] + "..." if cut else line)


# Each layer, and each expert of a layer, has an entry in the parameter table, which is made before
# it is compared with the checkpoint.
MOST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 4096,
    "num_local_experts": 4096,
    "num_experts": 4096,
}


MAX_INT32 = 2**31 - 1  # the device's positions, slots and counts are int32
# Items of a list from a caller; far above any vocabulary, context or batch.
MOST_ITEMS = 2**24


def shown(value: object) -> str:
    """Return a value for a message, at most 200 characters of it."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return f"one {type(value).__name__} of too many digits"
    except Exception:  # nested too deeply, or an object whose own repr fails
        return f"one {type(value).__name__} that cannot be printed"


def printable(name: str) -> str:
    """Return a name for a message: as it is if a terminal can print it, at most 200 characters."""
    return f"{name:.200}" if name.isprintable() else shown(name)


def read_int(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """Return an integer of a raw config.json, from `least` to MOST's or int32's largest.

    ConfigError for any other value, and if the key is absent and has no default.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None or not is_int(value) or value < least:
        raise ConfigError(
            f"config.json: expected {key} to be an integer of at least {least}, got {shown(value)}"
        )
    most = MOST.get(key, MAX_INT32)
    if value > most:
        raise ConfigError(
            f"config.json: expected {key} to be an integer of at most {most}, got {shown(value)}"
        )
    return int(value)


@contextlib.contextmanager
def values_as_sentences() -> Iterator[None]:
    """Raise ConfigError for a value that fails in arithmetic or is no list where one is read."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ConfigError(
            "config.json: expected values of the kinds that its model_type has, "
            f"got {type(e).__name__}: {e}"
        ) from e


def read_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a switch of a raw config.json, or the default where it is absent or null.

    ConfigError for anything but true and false: the text "false" would count as true.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: expected {key} to be true or false, got {shown(value)}")
    return value


def read_number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number of a raw config.json, or the default where it is absent."""
    value = config.get(key)
    if value is None:
        return default
    if not is_number(value) or value <= 0:
        raise ConfigError(
            f"config.json: expected {key} to be a positive number, got {shown(value)}"
        )
    return float(value)


def read_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object of a raw config.json; an empty one where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: expected {key} to be an object, got {shown(value)}")
    return value or {}


def check_unicode(text: str, where: str) -> None:
    """Raise ConfigError for a text with half a character, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(
            f"{where}: expected Unicode, got half a character (a lone surrogate), "
            f"{text[e.start]!r}, at {e.start}"
        ) from None


def refuse_unless(config: Mapping[str, Any], key: str, expected: object) -> None:
    """Raise for a switch of a raw config.json that asks for maths that is not implemented.

    null counts as absent.
    """
    if config.get(key) is not None and config[key] != expected:
        raise ConfigError(
            f"{key}: expected {expected!r} for model_type {config.get('model_type')!r}, "
            f"got {shown(config[key])}"
        )


def is_number(x: object) -> bool:
    """Whether x is a finite real number within the range of a float; booleans are not."""
    if type(x) is not float and (not isinstance(x, numbers.Real) or isinstance(x, bool)):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer such as 10**400
        return False


def is_int(x: object) -> bool:
    """Whether x is an integer, NumPy's included; booleans are not."""
    if type(x) is int:  # an abstract class takes isinstance ten times as long
        return True
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_positive_int(x: Any) -> bool:
    """Whether x is an integer of at least 1."""
    return is_int(x) and x >= 1


def check_positive_int(name: str, value: object, kind: str = "an integer of at least 1") -> None:
    """Raise ConfigError unless a value is an integer from 1 to MAX_INT32.

    kind: what is expected, in the message
    """
    if not is_positive_int(value):
        raise ConfigError(f"{name}: expected {kind}, got {shown(value)}")
    check_int32(name, value)


def check_int32(name: str, value: object) -> None:
    """Raise ConfigError for an integer that the device cannot hold; other values pass."""
    if is_int(value) and value > MAX_INT32:  # pyright: ignore[reportOperatorIssue]
        raise ConfigError(f"{name}: expected at most 2**31 - 1, got {shown(value)}")


def is_one_of(value: object, names: Iterable[str]) -> bool:
    """Whether a value is one of these names; an array compares with a text in ways of its own."""
    return isinstance(value, str) and value in names


def as_python(value: Any) -> Any:
    """Return the list or number of an array of NumPy or JAX; anything else unchanged.

    An array without axes has __iter__, but no items.
    """
    if isinstance(value, memoryview):  # of bytes, which are no token ids
        return value
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # no array after all
        return value


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a list, an array or another iterable; None for anything else.

    A text, bytes and a mapping are no lists, and neither is what has more than MOST_ITEMS items,
    such as an endless iterator. ConfigError if taking the items fails.
    """
    if type(value) in (list, tuple):  # most often; the checks below take ten times as long
        return list(value) if len(value) <= MOST_ITEMS else None
    value = as_python(value)
    no_lists = (str, bytes, bytearray, memoryview, Mapping)
    if isinstance(value, no_lists) or not isinstance(value, Iterable):
        return None
    try:
        if isinstance(value, Sized) and len(value) > MOST_ITEMS:  # without taking any
            return None
        items = list(islice(value, MOST_ITEMS + 1))
    except OverflowError:  # of len(), which counts to sys.maxsize
        return None
    except Exception as e:  # of the caller's own iterator
        raise ConfigError(
            f"expected a list, got {shown(value)}, whose items fail ({shown(e)})"
        ) from e
    return items if len(items) <= MOST_ITEMS else None


def settle_integers(config: Any) -> None:
    """Convert NumPy's integers in the fields of a dataclass to Python's.

    Python's neither overflow nor lack bit_length.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if is_int(value):
            set_field(config, field.name, int(value))


def set_field(config: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass, which its __post_init__ alone may do."""
    object.__setattr__(config, name, value)
