"""CLIP's byte-pair tokenizer, on the `tokenizers` library. Of a file only vocabulary and merges are taken: other parts,
which could be slow, random or make the library abort, must be CLIP's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from torch import Tensor

from clipcil.clip.config import TokenId
from clipcil.errors import UserError, first_line
from clipcil.settings import typed
from clipcil.storage import read_json, read_text

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
FILES = "tokenizer.json, or vocab.json and merges.txt"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
_BLANKS = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
_NORMALIZERS = [{"type": "NFC"}, _BLANKS, {"type": "Lowercase"}]
_SPLIT = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True}
_MODEL: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "end_of_word_suffix": ("</w>",),
    "continuing_subword_prefix": (None, ""),
    **dict.fromkeys(("dropout", "fuse_unk", "byte_fallback", "ignore_merges"), (None, False)),
}
"""The values of CLIP's model of a `tokenizer.json`."""


class Tokenizer:
    """Texts → ids with start and end tokens, padded to the longest text."""

    def __init__(self, backend: Backend, context: int, fingerprint: str) -> None:
        self._backend, self.context = backend, context
        self.fingerprint = fingerprint
        """Short SHA-256 of the files. (Versions of the library write the same tokenizer differently.)"""
        self.bos, self.eos = backend.encode("").ids

    @classmethod
    def from_folder(cls, folder: Path, context: int) -> Tokenizer:
        """From `tokenizer.json`, or from `vocab.json` and `merges.txt` as in OpenAI's hub repositories."""
        whole, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        try:
            if whole.is_file():
                return cls(_from_json(read_json(whole, links=True)), context, _fingerprint(whole))
            if vocab.is_file() and merges.is_file():
                table = typed(read_json(vocab, links=True), dict[str, TokenId])
                lines = read_text(merges, links=True).splitlines()
                rules = [line for line in lines if not line.startswith("#version:")]
                return cls(_bpe(table, rules, EOS), context, _fingerprint(vocab, merges))
        except Exception as error:  # the library raises bare Exception for what it cannot read
            raise UserError(f"cannot read the tokenizer in {folder}: {first_line(error)}; copy it again") from error
        raise UserError(f"no tokenizer in {folder}: put {FILES} of the backbone there")

    @property
    def vocab(self) -> int:
        """Number of ids."""
        return 1 + max(self._backend.get_vocab().values())

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """N texts → ids (N, L) int64, padded with the end token, and the positions of the end tokens (N,)."""
        rows = [encoding.ids for encoding in self._backend.encode_batch(list(texts))]
        for text, row in zip(texts, rows, strict=True):
            shown = text if len(text) <= 80 else text[:77] + "..."
            if len(row) > self.context:
                raise UserError(
                    f"'{shown}' takes {len(row)} tokens with start and end, the backbone reads {self.context}; "
                    "shorten the class name or the prompt"
                )
            if row.index(self.eos) != len(row) - 1 or self.bos in row[1:]:
                raise UserError(f"'{shown}' contains {BOS} or {EOS}, which mark where a text begins and ends")
        ends = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int64)
        longest = max(map(len, rows), default=0)
        ids = torch.full((len(rows), longest), self.eos, dtype=torch.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
        return ids, ends


def _from_json(table: dict[str, Any]) -> Backend:
    """The tokenizer of a `tokenizer.json`; a `UserError` where a part is not CLIP's."""
    model: dict[str, Any] = typed(table["model"], dict[str, Any], "model")
    for key, allowed in _MODEL.items():
        if model.get(key) not in allowed:
            raise UserError(f"'model.{key}' is '{str(model.get(key))[:60]}', not CLIP's")
    added = {each["content"]: each["id"] for each in table.get("added_tokens", [])}
    if more := added.keys() - {BOS, EOS}:
        raise UserError(f"it adds the token '{min(more)[:60]}'")
    split, letters = table["pre_tokenizer"]["pretokenizers"]
    words = split["pattern"]["Regex"].removeprefix(r"<\|startoftext\|>|<\|endoftext\|>|")
    split = {**split, "pattern": {"Regex": words.replace(r"[\p{L}]", r"\p{L}").replace(r"[\p{N}]", r"\p{N}")}}
    ours = (_NORMALIZERS, _SPLIT, ("ByteLevel", False))
    if (table["normalizer"]["normalizers"], split, (letters["type"], letters["add_prefix_space"])) != ours:
        raise UserError("its normalizer or pre-tokenizer is not CLIP's")
    if (table.get("post_processor") or {}).get("type") not in ("RobertaProcessing", "TemplateProcessing"):
        raise UserError(f"it does not put {BOS} and {EOS} around a text")
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return _bpe(typed(model["vocab"] | added, dict[str, TokenId], "vocab"), merges, model.get("unk_token"))


def _bpe(vocab: dict[str, int], merges: Sequence[str], unknown: str | None) -> Backend:
    """CLIP's pipeline around a vocabulary: NFC, white space to one blank, lower case, word pattern, bytes, BPE."""
    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in merges) if right]
    if lost := [left + right for left, right in pairs if left + right not in vocab]:  # the library may panic
        raise UserError(f"it merges letters to '{lost[0][:80]}', which is not in the vocabulary")
    if unknown is not None and unknown not in vocab:
        raise UserError(f"its token '{unknown[:80]}' for what is unknown is not in the vocabulary")
    backend = Backend(BPE(vocab=vocab, merges=pairs, end_of_word_suffix="</w>", unk_token=unknown))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.add_special_tokens([BOS, EOS])
    backend.post_processor = processors.RobertaProcessing((EOS, vocab[EOS]), (BOS, vocab[BOS]), False, False)
    return backend


def _fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:12]
