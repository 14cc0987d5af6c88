"""The state of a model: the contents of `model.toml`, and the tensors beside it; all checked when read."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import AfterValidator, Field, TypeAdapter
from torch import Tensor

import clipcil
from clipcil.classifier.scoring import Calibration
from clipcil.data.names import Template, folder_class, need_text, same_name
from clipcil.errors import UserError, nearest
from clipcil.settings import Count, Text, typed

FORMAT = 1, 1
"""Version of the folder. A later minor version only adds; a later major version cannot be read by this program."""
WEIGHTS = re.compile(r"weights-[0-9a-f]{12}\.safetensors")
"""Names of files of weights; the digits are the beginning of the file's SHA-256."""

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Day = Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")]
"""A day such as 2026-01-31, or nothing."""


@dataclass
class KnownClass:
    """A class the model knows."""

    name: Name
    text: Name
    """The name it was taught under: the text inside its prompt. Renaming changes `name` alone, so no score moves."""
    learnt: Day
    """The day of its first pictures."""
    pictures: Count
    """Pictures it was trained on, all lessons together."""
    newest: Day
    """The day of its newest pictures."""
    held_out: Count = 0
    """Pictures of it that are kept for evaluation, all lessons together."""
    right: Count = 0
    """Those of them that the model classified correctly after its last lesson."""


@dataclass(frozen=True)
class LessonRecord:
    """What a model stores about a lesson."""

    when: Text
    """Date and time, as ISO 8601 with the seconds."""
    new: Count
    """Classes that were new."""
    again: Count
    """Classes that were known and got more pictures."""
    pictures: Count
    """Pictures given."""
    classes: Count
    """Classes known after it."""
    held_out: Count
    """Pictures of all classes that the accuracy was measured on."""
    right: Count
    """Those that were classified correctly after the lesson."""

    @property
    def accuracy(self) -> float | None:
        return self.right / self.held_out if self.held_out else None


def _possible(kept: Any) -> Any:
    if kept.right > kept.held_out:
        raise ValueError(f"{kept.right} of {kept.held_out} pictures cannot be right")
    return kept


@dataclass(kw_only=True)
class Facts:
    """Everything about a model except its weights, in the order of `model.toml`."""

    method: Text
    backbone: Text = ""
    fingerprint: Text = ""
    """Of the backbone's weights and of its preprocessing."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    templates: Annotated[tuple[Template, ...], Field(min_length=1, max_length=1000)]
    lessons: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How often it was taught; the seed of a lesson follows from it."""
    sizes: list[Annotated[int, Field(ge=1, le=1_000_000)]] = field(default_factory=list)
    """Classes of each task."""
    weights: Text = ""
    """Name of the file of weights."""
    sha256: Text = ""
    """Of that file."""
    settings: dict[str, Any] = field(default_factory=dict)
    calibration: Annotated[Calibration, Field(alias="unknown")] = field(default_factory=Calibration)
    history: list[Annotated[LessonRecord, AfterValidator(_possible)]] = field(default_factory=list)
    """What each lesson brought, the oldest first."""
    known: Annotated[list[Annotated[KnownClass, AfterValidator(_possible)]], Field(alias="classes")] = field(
        default_factory=list
    )

    @property
    def task_of(self) -> list[int]:
        """The task in which each class was learnt, counted from 0."""
        return [task for task, size in enumerate(self.sizes) for _ in range(size)]

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        return [known.name for known in self.known]

    @property
    def right(self) -> tuple[int, int]:
        """Number of pictures kept for evaluation that are classified correctly, and of all of them."""
        return sum(known.right for known in self.known), sum(known.held_out for known in self.known)

    def find(self, names: list[str]) -> list[int | None]:
        """The class of each name. CLIP reads everything in lower case, so case makes no difference.

        A model of an earlier version may have names with the numbers of folders, `001.Black footed Albatross`.
        """
        names_of = [known.name for known in self.known]
        places = {same_name(folder_class(name)): index for index, name in enumerate(names_of)}
        places |= {same_name(name): index for index, name in enumerate(names_of)}
        return [places.get(same_name(need_text(name))) for name in names]

    def need(self, name: str) -> int:
        """The class called `name`; a `UserError` names the nearest where there is none."""
        index = self.find([name])[0]
        if index is None:
            raise UserError(f"the model knows no class '{name}'{nearest(name, self.names)}")
        return index


class NewerFormatError(UserError):
    """The model was written by a later version of clipcil, in a format that this one cannot read."""


def parse_facts(table: dict[str, Any]) -> Facts:
    """The contents of a `model.toml`, checked; the caller adds the name of the file to the `UserError`."""
    version = str(table.get("format"))[:60]
    if not version.startswith(f"{FORMAT[0]}."):
        raise NewerFormatError(
            f"has format {version}, written by clipcil {table.get('clipcil', '?')}; this is clipcil"
            f" {clipcil.__version__}, which reads {FORMAT[0]}.x: install a newer one"
        )
    facts: Facts = typed(table, Facts)
    if sum(facts.sizes) != len(facts.known) or not facts.known:
        raise UserError(f"'sizes' count {sum(facts.sizes)} classes, but there are {len(facts.known)}")
    if not WEIGHTS.fullmatch(facts.weights):
        raise UserError(f"'weights' is '{facts.weights[:60]}', which is not the name of a weights file")
    return facts


def to_table(facts: Facts) -> dict[str, Any]:
    """The contents of `model.toml`."""
    table = TypeAdapter(Facts).dump_python(facts, by_alias=True, exclude_none=True)
    for each, task in zip(table["classes"], facts.task_of, strict=True):
        each["task"] = task
    return {"format": ".".join(map(str, FORMAT)), "clipcil": clipcil.__version__, **table}


class ModelState(NamedTuple):
    """Everything about a model that lessons change, as its folder holds it."""

    facts: Facts
    tensors: dict[str, Tensor]
    """Those of the method; those of `HeldOut` and `TaughtPictures` under their prefixes."""


@dataclass
class PictureRows:
    """Tensors with a row for each picture that a model keeps something of. Subclasses add columns."""

    prefix: ClassVar[str]
    """What the names of the tensors begin with among the weights of a model."""
    labels: Tensor
    """(N,) int64, the class of each picture."""

    def __len__(self) -> int:
        return len(self.labels)

    def with_rows(self, *columns: Tensor) -> Self:
        """With these rows added; one tensor for each column."""
        return type(self)(*map(torch.cat, zip(vars(self).values(), columns, strict=True)))

    def without(self, index: int) -> Self:
        """Without class `index`; the labels of the classes after it move down by one."""
        labels, *others = (column[self.labels != index] for column in vars(self).values())
        return type(self)(labels - (labels > index).long(), *others)

    def tensors(self) -> dict[str, Tensor]:
        """The columns under their names in the weights file."""
        return {f"{self.prefix}{name}": column for name, column in vars(self).items()}

    def take(self, tensors: dict[str, Tensor], classes: int) -> Self:
        """Take the rows out of the weights of a model with so many classes; `self`, without rows, where it has none."""
        own = {key.removeprefix(self.prefix): tensors.pop(key) for key in list(tensors) if key.startswith(self.prefix)}
        if not own:
            return self
        columns = [own.get(name, torch.zeros(())) for name in vars(self)]
        count, known = columns[0].shape[:1] or (-1,), range(classes)
        fit = all(
            column.shape == (*count, *like.shape[1:]) and column.dtype == like.dtype
            for column, like in zip(columns, vars(self).values(), strict=True)
        )
        if not fit or not all(label in known for label in torch.unique(columns[0]).tolist()):
            raise UserError(f"'{self.prefix}…' of the model is damaged; restore its folder from a copy")
        return type(self)(*columns)


@dataclass
class TaughtPictures(PictureRows):
    """The class and the checksum of every picture the model was taught."""

    prefix: ClassVar[str] = "taught."
    checksums: Tensor
    """(N,) int64."""
