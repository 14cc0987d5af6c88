"""A classifier that goes on learning: new folders of pictures arrive, the old ones may be gone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipcil.classifier.lesson import Lesson, split_held_out
from clipcil.classifier.model_folder import Facts, Known, read_model, read_weights, today, write_model
from clipcil.classifier.predicting import BatchReader, Prediction, rank, stream_logits
from clipcil.classifier.sources import TEMPLATE, Source, read_source
from clipcil.classifier.unknown import Calibration, calibrate, probabilities
from clipcil.classifier.watch import LearnMonitor
from clipcil.clip import load_clip
from clipcil.data.broken import drop_broken
from clipcil.data.dataset import Dataset
from clipcil.data.reader import Pictures, Reader
from clipcil.data.stream import Task
from clipcil.errors import UserError, nearest
from clipcil.experiment.checkpoint import method_state, restore_method
from clipcil.experiment.display import Display
from clipcil.experiment.run import make_fabric, own_tower
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.files import run_lock
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.settings import override, to_dict
from clipcil.training.loop import Session

HELD = "held_out"
"""What the scores of held-out pictures are called among the weights."""


class Classifier:
    """Learns classes of pictures a few at a time, and tells them apart.

    >>> import clipcil
    >>> from PIL import Image
    >>> def plain(*colours): return [Image.new("RGB", (64, 64), colour) for colour in colours]
    >>> model = clipcil.Classifier("simplecil")
    >>> lesson = model.learn({"red": plain("red", "darkred"), "blue": plain("blue", "navy")})
    >>> lesson = model.learn({"green": plain("green", "lime")})   # the pictures of before are not needed
    >>> model.classes
    ['red', 'blue', 'green']
    >>> model.predict(plain("crimson"), top=1)[0].name
    'red'
    """

    def __init__(
        self, method: str = "dmc-ot", backbone: str = "mini", seed: int = 0, *, device: str = "cpu", **settings: Any
    ) -> None:
        """
        method: one of `clipcil methods`. backbone: "mini" (embedded), a Hugging Face id or folder, or a file.
        settings: of the method, such as `beta=0.2` or `stage1={"epochs": 5}`; `clipcil methods METHOD` lists them.
        """
        spec = RunSpec(method=method, data="folder", backbone=str(backbone), seed=seed)
        self._open(spec, method_settings(spec, settings), device)
        self._build({}, {"names": [], "sizes": []})

    def _open(self, spec: RunSpec, config: Any, device: str) -> None:
        self.seed, self.config = spec.seed, config
        self._kind = find_method(spec.method)
        self._monitor = LearnMonitor()
        self._session = Session(make_fabric(device, "32-true") if device != "cpu" else None, self._monitor)
        self._clip = load_clip(spec.backbone).to(self._session.device)
        self._backbone = spec.backbone
        self._templates: tuple[str, ...] = (TEMPLATE,)
        self._known: list[Known] = []
        self._lessons = 0
        self._source: tuple[Path, str] | None = None  # the folder it was loaded from, and the weights that lay there
        self.calibration = Calibration()
        self._held = torch.zeros(0, 2, dtype=torch.float64)  # class and score of every held-out picture

    def _build(self, tensors: dict[str, Tensor], shape: dict[str, Any]) -> None:
        """The method as `method_state` described it, or a fresh one."""
        clip = own_tower(self._clip) if self._kind.tunes_tower else self._clip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self._method: Method = self._kind(self.config, clip, self._session).to(self._session.device)
            self._method.templates = self._templates
            if shape["sizes"]:
                restore_method(self._method, tensors, shape)
        self._method.eval()
        self._reader = BatchReader(clip, self._session.device)

    @property
    def classes(self) -> list[str]:
        """Names of the classes it knows, in the order in which they were learnt."""
        return [known.name for known in self._known]

    def learn(
        self, source: Source, *, hold_out: bool = True, skip_broken: bool = False, display: Display | None = None
    ) -> Lesson:
        """Learn new classes, and more pictures of classes already known.

        source: a folder with a folder of pictures for each class, `{name: [pictures]}`, or a dataset.
        hold_out: keep a tenth of the pictures of each class (none where it has fewer than five) out of training, to
            measure on them and to set the threshold for "none of these".
        skip_broken: leave out pictures that cannot be decoded instead of stopping at the first.

        Either all of it is learnt or, if anything fails or is stopped, nothing.
        """
        display = display or Display()
        dataset, lesson = read_source(source), Lesson()
        if skip_broken:
            dataset, lesson.left_out = drop_broken(dataset, display.progress)
        self._plan(dataset, lesson)
        self._monitor.display = display
        reader = Reader(self._method.clip, None, self._session.device)  # no picture stays on disk
        reader.on_progress = display.progress
        before = self._snapshot()
        if not self._known:
            self._templates = self._method.templates = dataset.templates
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed + 1_000_003 * self._lessons)
                self._teach(dataset, reader, lesson, hold_out)
        except BaseException:
            self._restore(before)
            raise
        finally:
            reader.close()
            self._monitor.display = Display()
        return lesson

    def _plan(self, dataset: Dataset, lesson: Lesson) -> None:
        """Which classes are new and which are known; says so before anything is learnt if one of them cannot be."""
        counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist()
        for name, count in zip(dataset.classes, counts, strict=True):
            if not count:
                raise UserError(f"no picture of class '{name}' can be read")
            (lesson.new if self._find(name) is None else lesson.again)[name] = count
        if lesson.again and self._kind.learn_again is Method.learn_again:
            self._method.learn_again(None)  # type: ignore[arg-type]  # it raises, naming the methods that can

    def _teach(self, dataset: Dataset, reader: Reader, lesson: Lesson, hold_out: bool) -> None:
        method, seen = self._method, self._method.seen
        fresh = {name: seen + place for place, name in enumerate(lesson.new)}
        places = torch.tensor([fresh.get(name, self._find(name) or 0) for name in dataset.classes])
        labels = places[dataset.train.labels]
        train, held = split_held_out(labels) if hold_out else (torch.arange(len(labels)), torch.empty(0).long())

        def pictures(rows: Tensor) -> Pictures:
            rows = rows[torch.argsort(labels[rows], stable=True)]
            return reader.open(dataset.train.subset(rows, labels[rows]))

        new, known = train[labels[train] >= seen], train[labels[train] < seen]
        method.train()
        for rows, hook, names in ((new, method.learn, lesson.new), (known, method.learn_again, lesson.again)):
            if len(rows):
                hook(Task(len(method.sizes), list(names), pictures(rows)))
        method.eval()
        counts = torch.bincount(labels[train], minlength=method.seen).tolist()
        self._known += [Known(name, name, today(), 0, today()) for name in lesson.new]
        for known_class, count in zip(self._known, counts, strict=True):
            known_class.pictures += count
            known_class.newest = today() if count else known_class.newest
        self._lessons += 1
        with self._monitor.phase("measuring"):
            self._measure(pictures(held), lesson)

    @torch.no_grad()
    def _measure(self, held: Pictures, lesson: Lesson) -> None:
        if len(held):
            logits = torch.cat([self._method.logits(batch) for batch in held.batches(256)]).float().cpu()
            labels = held.labels.cpu()
            right = logits.argmax(dim=1) == labels
            lesson.held_out, lesson.accuracy = len(held), float(right.double().mean())
            self.calibration = calibrate(logits, labels, self._held[:, 1], self._plain_temperature(logits))
            scores = probabilities(logits, self.calibration.temperature).max(dim=1).values
            self._held = torch.cat([self._held, torch.stack([labels.double(), scores], dim=1)])
        lesson.calibration = self.calibration

    def _plain_temperature(self, logits: Tensor) -> float:
        """CLIP's own scale for methods whose scores are bare cosines; 1 for those that scale them already."""
        return float(self._method.clip.scale) if float(logits.abs().max()) <= 1.001 else 1.0

    def predict(self, pictures: Sequence[Any], top: int = 5) -> list[Prediction]:
        """What each picture shows. A picture: a path, bytes of a file, a PIL image, or an array (height, width, 3)."""
        if isinstance(pictures, str | bytes | Path):
            raise UserError("predict takes a list of pictures; write predict([picture])")
        found = []
        for _, prediction in self.predict_stream(pictures, top):
            if prediction.error is not None:
                raise UserError(prediction.error)
            found.append(prediction)
        return found

    def predict_stream(self, pictures: Iterable[Any], top: int = 5) -> Iterator[tuple[Any, Prediction]]:
        """Each picture with its prediction, one after another: any number of pictures in the same memory.

        A picture that cannot be read gives a prediction with an `error`.
        """
        if not self._known:
            raise UserError("the model has learnt nothing yet; teach it first")
        if top < 1:
            raise UserError(f"top is {top}; ask for 1 class or more")
        names, how = self.classes, self.calibration
        for picture, result in stream_logits(pictures, self._reader, self._method.logits):
            if isinstance(result, UserError):
                yield picture, Prediction([], [], error=str(result))
            else:
                yield picture, rank(result, names, top, how.temperature, how.threshold)

    def forget(self, name: str) -> None:
        """Lose a class, with all that was kept of it."""
        index = self._need(name)
        if len(self._known) == 1:
            raise UserError(f"'{name}' is the only class of the model; delete the model instead")
        self._method.forget(index)
        del self._known[index]
        self._held = self._held[self._held[:, 0] != index]
        self._held[:, 0] -= (self._held[:, 0] > index).double()

    def rename(self, old: str, new: str) -> None:
        """Call a class something else. The text inside its prompt stays as it was taught, so no score changes."""
        index, taken = self._need(old), self._find(new)
        if not new.strip():
            raise UserError("the new name is empty; give the class a name")
        if taken is not None and taken != index:
            raise UserError(f"there is a class '{self._known[taken].name}' already; forget one of the two first")
        self._known[index].name = " ".join(new.split())

    def save(self, folder: str | Path) -> None:
        """Write the model to `folder`, whole or not at all; a model there is replaced unless another changed it."""
        folder = Path(folder)
        with run_lock(folder):
            self.write(folder)

    def write(self, folder: Path) -> None:
        """`save` for one who holds the lock of `folder`."""
        if not self._known:
            raise UserError("the model has learnt nothing yet; teach it before saving it")
        if self._source is not None and self._source[0] == folder.resolve():
            lies_there = read_model(folder).sha256
            if lies_there != self._source[1]:
                raise UserError(f"{folder} was changed by another since it was loaded; save to another folder")
        facts = self.facts()
        write_model(folder, facts, {**method_state(self._method)[0], HELD: self._held})
        self._source = (folder.resolve(), facts.sha256)

    def facts(self) -> Facts:
        """All there is to say about the model but its weights."""
        return Facts(
            method=self._kind.name,
            settings=to_dict(self.config),
            backbone=self._backbone,
            fingerprint=self._fingerprint(),
            seed=self.seed,
            templates=self._templates,
            lessons=self._lessons,
            sizes=list(self._method.sizes),
            known=copy.deepcopy(self._known),
            calibration=self.calibration,
        )

    def _fingerprint(self) -> str:
        return f"{self._clip.fingerprint}/{self._clip.preprocess.fingerprint}"

    def _find(self, name: str) -> int | None:
        """The class called `name`. CLIP reads everything in lower case, so case makes no difference."""
        key = " ".join(name.casefold().split())
        return next((i for i, known in enumerate(self._known) if known.name.casefold() == key), None)

    def _need(self, name: str) -> int:
        index = self._find(name)
        if index is None:
            raise UserError(f"the model knows no class '{name}'{nearest(name, self.classes)}")
        return index

    def _snapshot(self) -> tuple[Any, ...]:
        tensors, shape = method_state(self._method)
        kept = {key: value.clone() for key, value in tensors.items()} if self._known else {}
        return kept, copy.deepcopy(shape), copy.deepcopy(self._known), self._lessons, self.calibration, self._held

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        tensors, shape, self._known, self._lessons, self.calibration, self._held = snapshot
        self._build(tensors, shape)


def load(folder: str | Path, *, backbone: str | None = None, device: str = "cpu") -> Classifier:
    """The model saved in `folder`.

    backbone: where the backbone lies on this machine, if elsewhere than on the one that made the model.
    """
    folder = Path(folder)
    facts = read_model(folder)
    spec = RunSpec(method=facts.method, data="folder", backbone=backbone or facts.backbone, seed=facts.seed)
    model = Classifier.__new__(Classifier)
    model._open(spec, override(find_method(facts.method).Config(), facts.settings), device)
    if model._fingerprint() != facts.fingerprint:
        raise UserError(
            f"{folder} was made with a backbone of fingerprint {facts.fingerprint}, but '{model._backbone}' here is"
            f" {model._fingerprint()}; name the right one with backbone"
        )
    model._templates, model._known, model._lessons = facts.templates, facts.known, facts.lessons
    model.calibration = facts.calibration
    tensors = read_weights(folder, facts)
    model._held = tensors.pop(HELD)
    model._build(tensors, {"names": [known.text for known in facts.known], "sizes": facts.sizes})
    model._source = (folder.resolve(), facts.sha256)
    return model
