"""Whether a target and an independent draft have one vocabulary: each id stands for the same text.

Models of one tokenizer may be padded to different widths. Their tokenizers show that the ids agree.
"""

from __future__ import annotations

import logging
from pathlib import Path

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.loading.checkpoint import read_model_config
from jaxspec.loading.tokenizer import has_tokenizer, load_tokenizer

log = logging.getLogger(__name__)
FILE = "tokenizer.json"


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raise ConfigError unless the models in two folders have one vocabulary.

    Without two tokenizers, vocabularies of one width count as one, and a WARNING says so.
    """
    width, own = (
        models.config_from_hf(read_model_config(folder)).vocab_size for folder in (target, draft)
    )
    if not (has_tokenizer(target) and has_tokenizer(draft)):
        if width != own:
            raise ConfigError(
                f"speculative model {draft}: expected the target's vocabulary of {width} tokens, "
                "or a tokenizer beside each model to show that their ids agree, "
                f"got {own} tokens without"
            )
        log.warning("%s: no tokenizers show that its ids are those of %s", draft, target)
        return
    if _same_file(target / FILE, draft / FILE):
        return
    theirs, ours = _texts(target), _texts(draft)
    shared = [i for i in theirs.keys() & ours.keys() if i < min(width, own)]
    differing = sorted(i for i in shared if theirs[i] != ours[i])
    if differing or not shared:
        first = differing[0] if differing else min(theirs, default=0)
        raise ConfigError(
            f"speculative model {draft}: expected the target's tokens, where {first} is "
            f"{theirs.get(first)!r}, got {ours.get(first)!r} ({len(differing)} of {len(shared)} "
            "ids differ)"
        )


def _same_file(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file()) or one.stat().st_size != other.stat().st_size:
        return False
    return one.read_bytes() == other.read_bytes()


def _texts(folder: Path) -> dict[int, str]:
    """Return the text of each id; a special token's own, where the vocabulary has another."""
    hf = load_tokenizer(folder).hf
    ids = sorted(set(hf.get_vocab().values()))
    return dict(zip(ids, hf.convert_ids_to_tokens(ids), strict=True))
