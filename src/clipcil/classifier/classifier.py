"""A classifier that goes on learning: new folders of pictures arrive, the old ones may be gone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.calibration.pairs import paired_map
from clipcil.classifier.evaluation import Answer, Evaluation, evaluate_answers
from clipcil.classifier.held_out import HeldOut, LeavesOneOut, PixelsNeededError, choose_left_out, split_held_out
from clipcil.classifier.lesson import LearnMonitor, Lesson, LessonRecord, Progress
from clipcil.classifier.model_folder import Facts, Known, hold_model, load_model, now, read_model, today, write_model
from clipcil.classifier.predicting import Prediction, rank, stream_logits
from clipcil.classifier.sources import TEMPLATE, Source, read_source
from clipcil.classifier.unknown import ENOUGH, Calibration, calibrate
from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import MINI_1
from clipcil.data.batch import TensorBatch
from clipcil.data.broken import drop_broken
from clipcil.data.dataset import Dataset
from clipcil.data.names import check_names, clean_name, same_name
from clipcil.data.reader import Pictures, Reader
from clipcil.data.stream import Task
from clipcil.errors import UserError, nearest
from clipcil.experiment.checkpoint import method_state, restore_method
from clipcil.experiment.device import make_fabric
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.network import allow_downloads, on_behalf_of_a_folder
from clipcil.settings import nested, override, to_dict
from clipcil.training.loop import Session

DEFAULT_METHOD = "discriminant"
"""The method of a new model where none is named."""
SEED_STEP = 1_000_003
"""Lesson k draws from seed + k · SEED_STEP: a large prime, so that the lessons of models with neighbouring seeds never
share a seed."""
MEASURE_BATCH = 256
"""Held-out pictures scored at once, where a method needs their pixels."""

State = tuple[Facts, dict[str, Tensor]]
"""All of a model: what `model.toml` says, and the weights."""


class Classifier:
    """Learns classes of pictures a few at a time, and tells them apart.

    Args:
        method: One of `clipcil methods`.
        backbone: "mini" (embedded), a Hugging Face id, a folder or a file, or a loaded `CLIP`.
        seed: The same seed and the same lessons give the same model.
        device: cpu, cuda, mps or auto.
        settings: Settings of the method, such as `beta=0.2`, `stage1={"epochs": 5}` or `**{"stage1.epochs": 5}`;
            `clipcil methods METHOD` lists them.

    Example:
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
        >>> model.undo()   # takes the last lesson back
        >>> model.classes
        ['red', 'blue']
    """

    def __init__(
        self,
        method: str = DEFAULT_METHOD,
        backbone: str | Path | CLIP = "mini",
        seed: int = 0,
        *,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        if not isinstance(backbone, str | Path | CLIP):
            raise UserError(f"backbone is a {type(backbone).__name__}; give a name, a path or a CLIP")
        name = backbone.name if isinstance(backbone, CLIP) else str(backbone)
        spec = RunSpec(method=method, data="folder", backbone=name, seed=seed)
        config = method_settings(spec, nested(settings))
        clip = backbone if isinstance(backbone, CLIP) else load_clip(name)
        self._open(find_method(method), config, clip, name, seed, device)
        self._set_state((self.facts(), {}))

    def _open(self, kind: type[Method], config: Any, clip: CLIP, backbone: str, seed: int, device: str) -> None:
        """Everything that no lesson changes."""
        self.seed, self.config, self.device = seed, config, device
        self._kind, self._backbone = kind, backbone
        self._monitor = LearnMonitor()
        self._session = Session(make_fabric(device, "32-true") if device != "cpu" else None, self._monitor)
        self._clip = clip.to(self._session.device)
        self._source: tuple[Path, str] | None = None  # the folder it was loaded from, and the weights that lay there
        self._previous: State | None = None
        self._templates: tuple[str, ...] = (TEMPLATE,)
        self._known: list[Known] = []
        self._history: list[LessonRecord] = []
        self._lessons = 0
        self._held = self._no_held_out()
        self.calibration = Calibration()

    @property
    def classes(self) -> list[str]:
        """Names of the classes it knows, in the order in which they were learnt."""
        return [known.name for known in self._known]

    @property
    def class_facts(self) -> list[Known]:
        """Of each class: when it was learnt, from how many pictures, and how well held-out pictures of it are told."""
        return copy.deepcopy(self._known)

    @property
    def history(self) -> list[LessonRecord]:
        """The lessons it was given, the oldest first, each with the accuracy over all classes after it."""
        return list(self._history)

    def learn(
        self,
        source: Source,
        *,
        hold_out: bool = True,
        skip_broken: bool = False,
        on_progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Lesson:
        """Learn new classes, and more pictures of classes already known.

        Either all of it is learnt or, if anything fails or is stopped, nothing.

        Args:
            source: A folder with a folder of pictures for each class, `{name: [pictures]}`, or a dataset. A picture is
                a path, the bytes of a file, a PIL image or an array.
            hold_out: Keep the features of some pictures, to measure on them now and after later lessons and to set the
                threshold for "none of these". A method that can leave one picture out trains on them too and scores
                each as if it had not; others keep a tenth of each class (of five pictures or more) out of training.
            skip_broken: Leave out pictures that cannot be decoded instead of stopping at the first.
            on_progress: Called as `on_progress(stage, done, total)`; total is 0 where there is nothing to count.
            should_stop: Asked again and again; once it returns True the lesson ends and the model stays as it was.

        Returns:
            What was learnt, and how well all held-out pictures of all classes are told now.

        Raises:
            LessonStoppedError: `should_stop` returned True.
            UserError: The pictures cannot be learnt; the message says why.
        """
        dataset, lesson = read_source(source), Lesson()
        before = self._state()
        with self._monitor.watching(on_progress, should_stop):
            if skip_broken:
                dataset, lesson.left_out = drop_broken(dataset, self._monitor.progress)
            self._plan(dataset, lesson)
            reader = Reader(self._method.clip, None, self._session.device)  # no picture stays on disk
            reader.on_progress = self._monitor.progress
            if not self._known:
                self._templates = self._method.templates = dataset.templates
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self.seed + SEED_STEP * self._lessons)
                    self._teach(dataset, reader, lesson, hold_out)
            except BaseException:
                self._set_state(before)
                raise
            finally:
                reader.close()
        self._previous = before
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
        train, held = torch.arange(len(labels)), torch.empty(0, dtype=torch.int64)
        if hold_out and isinstance(method, LeavesOneOut):
            held = choose_left_out(labels)
        elif hold_out:
            train, held = split_held_out(labels)

        def pictures(rows: Tensor) -> Pictures:
            rows = rows[torch.argsort(labels[rows], stable=True)]
            return reader.open(dataset.train.subset(rows, labels[rows]))

        new, known = pictures(train[labels[train] >= seen]), pictures(train[labels[train] < seen])
        method.train()
        if len(new):
            with self._held_out_carried(new):
                method.learn(Task(len(method.sizes), list(lesson.new), new))
        if len(known):
            method.learn_again(Task(len(method.sizes), list(lesson.again), known))
        method.eval()
        counts = torch.bincount(labels[train], minlength=method.seen).tolist()
        self._known += [Known(name, name, today(), 0, today()) for name in lesson.new]
        for known_class, count in zip(self._known, counts, strict=True):
            known_class.pictures += count
            known_class.newest = today() if count else known_class.newest
        self._lessons += 1
        with self._monitor.phase("measuring"):
            self._measure(pictures(held), lesson)
        self._remember(lesson)

    @contextmanager
    def _held_out_carried(self, pictures: Pictures) -> Iterator[None]:
        """Carry the features of older held-out pictures along if the tower moves while the block runs.

        Those pictures are gone, so the tower cannot encode them again. The map is fitted to the features of `pictures`
        before and after, as a method's own calibration of its stored statistics is.
        """
        if not (self._kind.tunes_tower and len(self._held)):
            yield
            return
        version, before = self._method.clip.version, normalize(pictures.features, dim=-1)
        yield
        if self._method.clip.version != version:
            self._held = self._held.moved(paired_map(before, normalize(pictures.features, dim=-1)))

    @torch.no_grad()
    def _measure(self, held: Pictures, lesson: Lesson) -> None:
        """Score every held-out picture of every lesson with today's model."""
        lesson.left_one_out = isinstance(self._method, LeavesOneOut)
        lesson.held_out = 0 if lesson.left_one_out else len(held)
        self._held = self._held.with_pictures(held)
        try:
            labels, logits = self._held.labels, self._held_logits()
        except PixelsNeededError:
            self._held = self._no_held_out()
            batches = [self._method.logits(batch) for batch in held.batches(MEASURE_BATCH)]
            logits = torch.cat(batches).float().cpu() if batches else torch.zeros(0, self._method.seen)
            labels = held.labels.cpu()
            lesson.warnings.append(
                f"{self._kind.title} reads the pixels of a picture, not its features, so the accuracy and the threshold"
                " rest on the pictures held out of this lesson alone"
            )
        self.calibration = lesson.calibration = calibrate(logits, labels, self._plain_temperature())
        lesson.evaluation = self._evaluate(logits, labels)
        if len(self._known) == 1:
            lesson.warnings.append(
                f"the model knows one class, so it says '{self.classes[0]}' to every picture; teach it another class"
            )
        elif len(labels) < ENOUGH:
            lesson.warnings.append(
                f"{len(labels)} pictures to measure on are too few (fewer than {ENOUGH}) to tell unknown pictures, so"
                " none is called 'none of these' yet"
            )

    def _held_logits(self) -> Tensor:
        if not len(self._held):
            return torch.zeros(0, self._method.seen)
        batch = self._held.batch(self._session.device, self._clip.config.vision.width)
        method = self._method
        if isinstance(method, LeavesOneOut):
            return method.leave_one_out(batch, self._held.labels.to(self._session.device)).float().cpu()
        return method.logits(batch).float().cpu()

    def _evaluate(self, logits: Tensor, labels: Tensor) -> Evaluation:
        names, how = self.classes, self.calibration
        answers = [
            Answer(names[label], found.names[0], found.probabilities[0], found.unknown)
            for label, found in (
                (label, rank(row, names, 1, how.temperature, how.threshold))
                for label, row in zip(labels.tolist(), logits, strict=True)
            )
        ]
        return evaluate_answers(answers, names)

    @torch.no_grad()
    def held_out_evaluation(self) -> Evaluation:
        """How well the held-out pictures of all lessons are told by the model as it is now."""
        return self._evaluate(self._held_logits(), self._held.labels)

    def _remember(self, lesson: Lesson) -> None:
        """Write down how well each class is told, and the lesson."""
        found = lesson.evaluation
        for known in self._known:
            result = found.of(known.name)
            known.held_out, known.right = result.pictures, result.right
        pictures = sum(lesson.new.values()) + sum(lesson.again.values())
        counts = (len(lesson.new), len(lesson.again), pictures, len(self._known), found.pictures, found.right)
        self._history.append(LessonRecord(now(), *counts))

    def _plain_temperature(self) -> float:
        """CLIP's own scale for methods whose scores are bare cosines; 1 for those that scale them already."""
        return float(self._method.clip.scale) if self._kind.scores == "cosine" else 1.0

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
        for picture, result in self._logits(pictures):
            if isinstance(result, UserError):
                yield picture, Prediction([], [], error=str(result))
            else:
                yield picture, rank(result, names, top, how.temperature, how.threshold)

    def _logits(self, pictures: Iterable[Any]) -> Iterator[tuple[Any, Tensor | UserError]]:
        """Each picture with its logits (C,), or with the reason why it cannot be read."""
        return stream_logits(pictures, self._method.clip, self._session.device, self._method.logits)

    def forget(self, name: str) -> None:
        """Lose a class, with all that was kept of it."""
        index = self._need(name)
        if len(self._known) == 1:
            raise UserError(f"'{name}' is the only class of the model; delete the model instead")
        before = self._state()
        self._method.forget(index)
        del self._known[index]
        self._held = self._held.without(index)
        self._previous = before

    def rename(self, old: str, new: str) -> None:
        """Call a class something else. The text inside its prompt stays as it was taught, so no score changes."""
        index, taken = self._need(old), self._find(new)
        if not new.strip():
            raise UserError("the new name is empty; give the class a name")
        if taken is not None and taken != index:
            raise UserError(f"there is a class '{self._known[taken].name}' already; forget one of the two first")
        check_names("the model", [new])
        self._previous = self._state()
        self._known[index].name = clean_name(new)

    @property
    def can_undo(self) -> bool:
        """Whether there is a change to take back."""
        return self._previous is not None

    def undo(self) -> None:
        """Take back the last change: a lesson, a forgotten class or another name. Only one change can be taken back.

        Raises:
            UserError: There is nothing to take back.
        """
        if self._previous is None:
            raise UserError("there is no change to take back; the model before the last change is kept until the next")
        self._set_state(self._previous)
        self._previous = None

    def save(self, folder: str | Path) -> None:
        """Write the model to `folder`, whole or not at all; a model there is replaced unless another changed it."""
        folder = Path(folder)
        with hold_model(folder):
            self.write(folder)

    def write(self, folder: Path, *, keep_previous: bool = False) -> None:
        """`save` for one who holds the lock of `folder`; `keep_previous` keeps the model there for an undo."""
        if not self._known:
            raise UserError("the model has learnt nothing yet; teach it before saving it")
        if self._source is not None and self._source[0] == folder.resolve():
            lies_there = read_model(folder).sha256
            if lies_there != self._source[1]:
                raise UserError(f"{folder} was changed by another since it was loaded; save to another folder")
        facts, tensors = self._state()
        write_model(folder, facts, tensors, keep_previous=keep_previous)
        self._source = (folder.resolve(), facts.sha256)

    def facts(self) -> Facts:
        """All there is to say about the model but its weights."""
        return Facts(
            method=self._kind.name,
            settings=to_dict(self.config),
            backbone=self._clip.pinned if self._backbone == self._clip.name else self._backbone,
            fingerprint=self._fingerprint(),
            seed=self.seed,
            templates=self._templates,
            lessons=self._lessons,
            sizes=list(self._method.sizes) if self._known else [],
            known=copy.deepcopy(self._known),
            calibration=self.calibration,
            history=list(self._history),
        )

    def _fingerprint(self) -> str:
        return f"{self._clip.fingerprint}/{self._clip.preprocess.fingerprint}"

    def _find(self, name: str) -> int | None:
        """The class called `name`. CLIP reads everything in lower case, so case makes no difference."""
        key = same_name(name)
        return next((i for i, known in enumerate(self._known) if same_name(known.name) == key), None)

    def _need(self, name: str) -> int:
        index = self._find(name)
        if index is None:
            raise UserError(f"the model knows no class '{name}'{nearest(name, self.classes)}")
        return index

    def _no_held_out(self) -> HeldOut:
        return HeldOut.empty(self._clip.config.dim, sum(self._clip.vision.level_sizes))

    def _check(self, folder: Path) -> None:
        """Weights that load need not fit: see that a picture gets a finite score for every class."""
        try:
            pixels = torch.zeros(1, *self._clip.preprocess.shape, device=self._session.device)
            with torch.no_grad():
                logits = self._method.logits(TensorBatch(self._method.clip, pixels))
            fits = logits.shape == (1, len(self._known)) and bool(torch.isfinite(logits).all())
        except Exception as error:  # a stranger's numbers can break any step of any method
            raise UserError(f"the weights in {folder} do not fit its model ({type(error).__name__})") from error
        if not fits:
            raise UserError(f"the weights in {folder} do not fit its model; bring back the folder from a copy")

    def _state(self) -> State:
        """A copy of all that lessons change."""
        if not self._known:
            return self.facts(), {}
        tensors = {**method_state(self._method)[0], **self._held.tensors()}
        return self.facts(), {key: value.detach().clone() for key, value in tensors.items()}

    def _set_state(self, state: State) -> None:
        """Become what `state` says; the method is built anew."""
        facts, tensors = copy.deepcopy(state[0]), dict(state[1])
        self._templates, self._known, self._history = facts.templates, facts.known, facts.history
        self._lessons, self.calibration = facts.lessons, facts.calibration
        self._held = HeldOut.take(tensors, len(self._known), self._clip.config.dim, sum(self._clip.vision.level_sizes))
        clip = self._clip.with_own_vision_tower() if self._kind.tunes_tower else self._clip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self._method: Method = self._kind(self.config, clip, self._session, self._templates)
            self._method.to(self._session.device)
            if facts.sizes:
                names = [known.text for known in self._known]
                restore_method(self._method, tensors, {"names": names, "sizes": facts.sizes})
        self._method.eval()


def load(
    folder: str | Path, *, backbone: str | None = None, device: str = "cpu", allow_download: bool = False
) -> Classifier:
    """Load the model saved in `folder`.

    Args:
        folder: Where it was saved.
        backbone: Where the backbone lies on this machine, if elsewhere than on the one that made the model.
        device: cpu, cuda, mps or auto.
        allow_download: Fetch a backbone that the folder names and this machine lacks; one named here is fetched anyway.

    Raises:
        UserError: There is no model, it is damaged, or the backbone is another.

    Example:
        >>> import clipcil, tempfile
        >>> from PIL import Image
        >>> model = clipcil.Classifier("simplecil")
        >>> lesson = model.learn({name: [Image.new("RGB", (64, 64), name)] for name in ("red", "blue")})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model")
        ...     clipcil.load(f"{folder}/model").classes
        ['red', 'blue']
    """
    folder = Path(folder)
    facts, tensors = load_model(folder)  # first of all: a backbone takes its time, and a new model may come meanwhile
    name = backbone or facts.backbone
    spec = RunSpec(method=facts.method, data="folder", backbone=name, seed=facts.seed)
    kind = find_method(spec.method)
    config = override(kind.Config(), facts.settings)
    with allow_downloads(allow_download), on_behalf_of_a_folder(named=backbone is not None):
        clip = load_clip(name)
    model = Classifier.__new__(Classifier)
    model._open(kind, config, clip, name, spec.seed, device)
    if model._fingerprint() != facts.fingerprint:
        if facts.fingerprint == MINI_1:
            raise UserError(
                f"{folder} was taught with version 1 of the backbone mini, which clipcil 0.1.x reads:"
                " pip install 'clipcil<0.2', or teach it again from its pictures"
            )
        raise UserError(
            f"{folder} was made with a backbone of fingerprint {facts.fingerprint}, but '{name}' here is"
            f" {model._fingerprint()}; name the right one with backbone"
        )
    model._set_state((facts, tensors))
    model._check(folder)
    model._source = (folder.resolve(), facts.sha256)
    return model
