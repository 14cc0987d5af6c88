"""Our tokens against transformers' on 1,500 strings: words, templates, every corner of Unicode."""

import random
import shutil
from pathlib import Path

import pytest
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from support.towers import write_openai_vocabulary

WORDS = [
    *("octopus", "Tree", "pickup_truck", "golden-retriever", "it's", "We'll", "they've", "I'd", "she's", "l'été"),
    *("café", "cafe\u0301", "naïve", "Ångström", "Straße", "ΑΘΗΝΑ", "ς", "İstanbul", "ﬁne", "Ⅷ", "½", "日本語", "中文"),
    *("한국어", "עברית", "العربية", "हिन्दी", "ไทย", "😀", "👩\u200d👩\u200d👧", "🇫🇷"),
    *("e\u0301\u0327", "\u200bzero\u200dwidth"),
    *("3D", "2024", "1,000", "50%", "a&b", "C++", "#1", "(x)", "[y]", "{z}", "...", "!?", "--", "—", "…", "“q”", "‘r’"),
    *("<b>", "</w>", "<|start|", "\\n", "'", "''s", "'s't", "\ufeff", "x\u0000y"),
]
RANGES = ((0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x5FF), (0x900, 0x9FF), (0x1E00, 0x20FF), (0x3040, 0x30FF),
          (0x4E00, 0x4FFF), (0xAC00, 0xACFF), (0x1F300, 0x1F6FF), (0x0, 0x1F), (0x2000, 0x206F))  # fmt: skip


def strings() -> list[str]:
    draw = random.Random(0)
    made = ["", " ", "\t\n", "A photo of a cat.", *WORDS]
    for _ in range(700):
        made.append(draw.choice([" ", "  ", "\n", ""]).join(draw.choices(WORDS, k=draw.randint(1, 5))))
    for _ in range(800):
        low, high = draw.choice(RANGES)
        made.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 9))))
    return made


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json", "as transformers saves it"])
def test_tokens(kind: str, tmp_path: Path) -> None:
    if kind == "tokenizer.json":
        shutil.copy(MINI / "tokenizer.json", tmp_path)
        oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    else:
        write_openai_vocabulary(tmp_path)
        oracle = CLIPTokenizer.from_pretrained(tmp_path)
        if kind != "vocab.json":
            oracle.save_pretrained(tmp_path)
            assert (tmp_path / "tokenizer.json").is_file()
    ours = Tokenizer.from_folder(tmp_path, 10_000)
    assert (ours.bos, ours.eos) == ((0, 1) if kind == "tokenizer.json" else (8190, 8191))
    texts = strings()
    assert len(set(texts)) > 1_000
    ids, ends = ours(texts)
    for text, row, end, expected in zip(texts, ids, ends, oracle(texts)["input_ids"], strict=True):
        assert row[: end + 1].tolist() == expected, repr(text)
        assert set(row[end:].tolist()) == {ours.eos}
