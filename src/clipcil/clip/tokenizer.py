"""CLIP's byte-pair tokenizer, on the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from torch import Tensor

from clipcil.errors import UserError, first_line

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
FILES = "tokenizer.json, or vocab.json and merges.txt"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"


class Tokenizer:
    """Texts → ids with start and end tokens, padded to the longest text."""

    def __init__(self, backend: Backend, context: int, fingerprint: str) -> None:
        bos, eos = backend.token_to_id(BOS), backend.token_to_id(EOS)
        # The file may ask for truncation, which would cut class names silently.
        backend.no_truncation()
        backend.no_padding()
        if bos is None or eos is None or backend.encode("").ids != [bos, eos]:
            raise UserError(f"the tokenizer does not put CLIP's {BOS} and {EOS} around a text; use the backbone's own")
        self._backend = backend
        self.context = context
        self.fingerprint = fingerprint
        """Short SHA-256 of the files. (Versions of the library write the same tokenizer differently.)"""
        self.bos, self.eos = bos, eos

    @classmethod
    def from_folder(cls, folder: Path, context: int) -> Tokenizer:
        """From `tokenizer.json`, or from `vocab.json` and `merges.txt` as in OpenAI's hub repositories."""
        whole, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        try:
            if whole.is_file():
                return cls(Backend.from_file(str(whole)), context, _fingerprint(whole))
            if vocab.is_file() and merges.is_file():
                return cls(_openai_bpe(vocab, merges), context, _fingerprint(vocab, merges))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library raises bare Exception for a file it cannot read, or panics
            raise UserError(f"cannot read the tokenizer in {folder}: {first_line(error)}; copy it again") from error
        raise UserError(f"no tokenizer in {folder}: put {FILES} of the backbone there")

    @property
    def vocab(self) -> int:
        """Number of ids."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

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


def _openai_bpe(vocab: Path, merges: Path) -> Backend:
    """CLIP's pipeline around a vocabulary: NFC, white space to one blank, lower case, word pattern, bytes, BPE."""
    table = json.loads(vocab.read_text(encoding="utf-8"))
    lines = [line for line in merges.read_text(encoding="utf-8").splitlines() if not line.startswith("#version:")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if right]
    backend = Backend(BPE(vocab=table, merges=pairs, end_of_word_suffix="</w>", unk_token=EOS))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.add_special_tokens([BOS, EOS])
    backend.post_processor = processors.RobertaProcessing((EOS, table[EOS]), (BOS, table[BOS]), False, False)
    return backend


def _fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:12]
