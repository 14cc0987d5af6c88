"""A classifier that learns incrementally: new folders of pictures arrive, the old ones need not be kept."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image

from clipcil.classifier.explain import Explanation, explain
from clipcil.classifier.folder import MODEL, hold_model, read_model, write_model
from clipcil.classifier.learner import Learner, held_out_scores
from clipcil.classifier.lesson import Lesson, Progress
from clipcil.classifier.predict import PictureScores, Prediction, most_likely, stream_scores
from clipcil.classifier.scoring import Answer, Calibration, Evaluation, evaluate_answers, probabilities
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.sources import TEMPLATE, Source, as_list, read_source, skipped_files
from clipcil.classifier.state import Facts, KnownClass, LessonRecord, ModelState
from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import backbone_name
from clipcil.data.dataset import drop_broken
from clipcil.data.names import check_names, clean_name
from clipcil.errors import UserError, counted
from clipcil.experiment.monitor import notebook_progress
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.registry import find_method
from clipcil.settings import build, nested, override

DEFAULT_METHOD = "strata"
"""The method of a new model where none is named."""


class Classifier:
    """An image classifier that learns classes a few at a time.

    Args:
        method: One of `clipcil methods`.
        backbone: "mini" (embedded), a Hugging Face id, a folder or a file, or a loaded `CLIP`.
        seed: The same seed and the same lessons give the same model.
        device: cpu, cuda or auto.
        settings: Settings of the method, such as `beta=0.2`, `stage1={"epochs": 5}` or `**{"stage1.epochs": 5}`;
            `clipcil methods METHOD` lists them.
        state: A saved model, which decides method, seed and settings; used by `load`.

    Examples:
        >>> import clipcil
        >>> from PIL import Image
        >>> def plain(*colours): return [Image.new("RGB", (64, 64), colour) for colour in colours]
        >>> model = clipcil.Classifier("simplecil")
        >>> lesson = model.learn({"light": plain("white", "ivory"), "dark": plain("black", "navy")})
        >>> lesson = model.learn({"red": plain("red", "darkred")})   # the earlier pictures are not needed
        >>> model.classes
        ['light', 'dark', 'red']
        >>> model.predict(plain("whitesmoke"), top=1)[0].name
        'light'
        >>> model.undo()   # undoes the last lesson
        >>> model.classes
        ['light', 'dark']
    """

    def __init__(
        self,
        method: str = DEFAULT_METHOD,
        backbone: str | Path | CLIP = "mini",
        seed: int = 0,
        *,
        device: str = "cpu",
        state: ModelState | None = None,
        **settings: Any,
    ) -> None:
        name = backbone_name(backbone)
        if state is None:
            kind = find_method(method)
            spec = build(RunSpec, {"method": kind.name, "data": "folder", "backbone": name, "seed": seed})
            config = method_settings(spec, nested(settings))
            state = ModelState(Facts(method=kind.name, seed=spec.seed, templates=(TEMPLATE,)), {})
        else:
            config = override(find_method(state.facts.method).Config(), state.facts.settings)
        clip = backbone if isinstance(backbone, CLIP) else load_clip(name)
        self.learner = Learner(config, clip, device, state)
        """The method with its classes, and what is kept of lessons."""
        self.saved: tuple[Path, Facts] | None = None
        """The folder that it was loaded from or written to, and what was there then."""
        self._previous: ModelState | None = None

    def __repr__(self) -> str:
        """`Classifier('strata', 'mini'): 5 classes from 2 lessons, accuracy 93 % of 30 pictures`."""
        facts, known = self.learner.facts, counted(len(self.classes), "class", "classes")
        text = f"Classifier({facts.method!r}, {self.learner.clip.name!r}): {known}"
        if not facts.history:
            return text
        right, total = facts.right
        told = f", accuracy {right / total:.0%} of {counted(total, 'picture')}" if total else ""
        return f"{text} from {counted(len(facts.history), 'lesson')}{told}"

    def _repr_html_(self) -> str:
        """The same as a paragraph and a table of the classes, for notebooks."""
        from clipcil.report.html import render

        return render("classes.html", text=repr(self), known=self.learner.facts.known)

    @property
    def classes(self) -> list[str]:
        """Names of the classes it knows, in the order in which they were learnt."""
        return self.learner.facts.names

    @property
    def class_facts(self) -> list[KnownClass]:
        """For each class: when it was learnt, from how many pictures, and its accuracy after the last lesson."""
        return self.facts().known

    @property
    def history(self) -> list[LessonRecord]:
        """The lessons, the oldest first, each with the accuracy over all classes after it."""
        return list(self.learner.facts.history)

    @property
    def calibration(self) -> Calibration:
        """The temperature, and the threshold for "none of these"."""
        return self.learner.facts.calibration

    def facts(self) -> Facts:
        """Everything about the model except its weights."""
        return copy.deepcopy(self.learner.facts)

    def learn(
        self,
        source: Source,
        *,
        hold_out: bool = True,
        skip_broken: bool = False,
        subfolders: bool = False,
        on_progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Lesson:
        """Learn new classes, and more pictures of classes already known.

        Either all of it is learnt or, if anything fails or is stopped, nothing. Pictures that were taught before are
        recognised by their bytes and left out.

        Args:
            source: A folder with a folder of pictures for each class, `{name: [pictures]}`, or a dataset. A picture is
                a path, the bytes of a file, a PIL image or an array.
            hold_out: Keep the features of some pictures, to evaluate on them now and after later lessons and to set the
                threshold for "none of these". A method with leave-one-out scores trains on them too and scores each
                as if it had not; others hold a tenth of each class (of five pictures or more) out of training.
            skip_broken: Leave out pictures that cannot be decoded instead of stopping at the first.
            subfolders: Accept class folders that hold folders of pictures and no picture themselves.
            on_progress: Called as `on_progress(stage, done, total)`; total is 0 where there is nothing to count.
                Default: a bar in a notebook, nothing elsewhere.
            should_stop: Called repeatedly; once it returns True the lesson ends and the model stays as it was.

        Returns:
            What was learnt, and the accuracy over all classes on the pictures kept for evaluation.

        Raises:
            LessonStoppedError: `should_stop` returned True.
            UserError: The pictures cannot be learnt; the message says why.
        """
        dataset, lesson, monitor = read_source(source, subfolders), Lesson(), self.learner.monitor
        if isinstance(source, str | Path):
            lesson.skipped = skipped_files(Path(source))
        with notebook_progress() as bar, monitor.watching(on_progress or bar, should_stop), self._changing():
            if skip_broken:
                dataset, lesson.unreadable = drop_broken(dataset, monitor.progress)
            self.learner.teach(dataset, lesson, hold_out)
        return lesson

    def preview(self, source: Source, *, subfolders: bool = False, on_progress: Progress | None = None) -> Lesson:
        """What `learn` would learn: a lesson without evaluation, which names the `unreadable` pictures. Other pictures
        that `learn` would refuse raise the same `UserError`."""
        dataset, lesson, monitor = read_source(source, subfolders), Lesson(), self.learner.monitor
        with monitor.watching(on_progress, None):
            dataset, lesson.unreadable = drop_broken(dataset, monitor.progress)
            sentences = [template.format(name) for name in dataset.classes for template in dataset.templates]
            self.learner.clip.tokenizer(sentences)  # refuses names that are too long for the backbone
            self.learner.plan(dataset, lesson)
        return lesson

    @property
    def features_transported(self) -> int:
        """Number of pictures kept for evaluation whose features were transported by a map, because the tower changed
        after their lesson."""
        return int(self.learner.held.carried.sum())

    def held_out_evaluation(self) -> Evaluation:
        """Evaluate the current model on the pictures kept for evaluation, of all lessons."""
        held = self.learner.held
        return self.learner.evaluate(held_out_scores(self.learner.method, held), held.labels)

    @overload
    def predict(self, pictures: str | bytes | Path | Image.Image, top: int = 5) -> Prediction: ...

    @overload
    def predict(self, pictures: Sequence[Any], top: int = 5) -> list[Prediction]: ...

    @overload
    def predict(self, pictures: Any, top: int = 5) -> Any: ...

    def predict(self, pictures: Any, top: int = 5) -> Any:
        """Classify one picture or many.

        Args:
            pictures: A picture (a path, the bytes of a file, a PIL image, or an array (height, width, 3)), or a list of
                pictures, or an array (number, height, width, 3).
            top: Number of classes to return.

        Returns:
            A `Prediction`, or a list of them.

        Raises:
            UserError: A picture cannot be read, or an array could be one picture or many.
        """
        many, one = as_list(pictures)
        found = [prediction for _, prediction in self.predict_stream(many, top)]
        if errors := [prediction.error for prediction in found if prediction.error is not None]:
            raise UserError(errors[0])
        return found[0] if one else found

    def explain(self, picture: Any, name: str | None = None) -> Explanation:
        """Why a picture is called what it is called: a heat map over it, and the most similar kept picture.

        Args:
            picture: One picture as for `predict`.
            name: The class to explain. Default: the likeliest.

        Returns:
            An `Explanation`; its `save` writes a PNG. Small pictures are kept in the folder of a model if its owner
            switched that on (`clipcil serve`); otherwise there is no most similar one.
        """
        self._need_classes()
        label = None if name is None else self.learner.facts.need(name)
        kept = [SmallPictures(self.saved[0]).of(each) if self.saved else [] for each in self.classes]
        return explain(self.learner.method, self.calibration, picture, label, self.classes, kept)

    def predict_proba(self, pictures: Any) -> np.ndarray:
        """Probabilities (number of pictures, number of classes), columns in the order of `classes`."""
        rows = []
        for _, scores in self._scores(as_list(pictures)[0]):
            if isinstance(scores, UserError):
                raise scores
            rows.append(probabilities(scores[0], self.calibration.temperature))
        return torch.stack(rows).numpy() if rows else np.zeros((0, len(self.classes)))

    def test(self, source: Source, *, subfolders: bool = False, on_progress: Progress | None = None) -> Evaluation:
        """Evaluate the model on labelled pictures; classes that it does not know count as unknown pictures.

        Args:
            source: As for `learn`.
            subfolders: As for `learn`.
            on_progress: As for `learn`.
        """
        dataset = read_source(source, subfolders)
        known, found = self.classes, self.learner.facts.find(dataset.classes)
        names = [own if place is None else known[place] for own, place in zip(dataset.classes, found, strict=True)]
        labels, answers, unreadable = dataset.train.labels.tolist(), [], []
        pictures = [dataset.train.pictures[row] for row in dataset.train.rows.tolist()]
        with notebook_progress() as bar, self.learner.monitor.watching(on_progress or bar, None):
            for label, (picture, guess) in zip(labels, self.predict_stream(pictures, top=2), strict=True):
                if guess.error is not None:
                    unreadable.append(guess.error)
                else:
                    answer = guess.answer_to(names[label])
                    answers.append(Answer(names[label], answer, guess.probabilities[0], guess.unknown, picture))
                self.learner.monitor.progress("testing", len(answers) + len(unreadable), len(pictures))
        return replace(evaluate_answers(answers, known), unreadable=unreadable)

    def score(self, source: Source) -> float:
        """The accuracy on pictures of known classes; those that it calls "none of these" are wrong."""
        accuracy = self.test(source).accuracy
        if accuracy is None:
            raise UserError("none of these pictures can be read and is of a class that the model knows")
        return accuracy

    def predict_stream(self, pictures: Iterable[Any], top: int = 5) -> Iterator[tuple[Any, Prediction]]:
        """Each picture with its prediction, one after another: memory does not grow with their number.

        A picture that cannot be read gives a prediction with an `error`.

        Args:
            pictures: Pictures as for `predict`, in any number.
            top: Number of classes to return.
        """
        if not isinstance(top, int) or top < 1:
            raise UserError(f"top is {top!r}; ask for 1 class or more")
        names, how = self.classes, self.calibration
        for picture, scores in self._scores(pictures):
            if isinstance(scores, UserError):
                yield picture, Prediction([], [], error=str(scores))
            else:
                yield picture, most_likely(*scores, names, top, how)

    def _scores(self, pictures: Iterable[Any]) -> Iterator[tuple[Any, PictureScores | UserError]]:
        self._need_classes()
        return stream_scores(pictures, self.learner.method)

    def _need_classes(self) -> None:
        if not self.classes:
            raise UserError("the model has learnt nothing yet; teach it first")

    def forget(self, name: str) -> None:
        """Remove a class (its name in any case), with everything that was kept of it. Not every method can do this."""
        index = self.learner.facts.need(name)
        if len(self.classes) == 1:
            raise UserError(f"'{name}' is the only class of the model; delete the model instead")
        with self._changing():
            self.learner.forget(index)

    def rename(self, old: str, new: str) -> None:
        """Rename a class. The text in its prompt stays the one it was taught with, so no score changes."""
        index, taken = self.learner.facts.need(old), self.learner.facts.find([new])[0]
        if not clean_name(new):
            raise UserError("the new name is empty; give the class a name")
        if taken is not None and taken != index:
            raise UserError(f"there is a class '{self.classes[taken]}' already; forget one of the two first")
        check_names("the model", [new])
        with self._changing():
            self.learner.facts.known[index].name = clean_name(new)

    def undo(self) -> None:
        """Undo the last change: a lesson, a forgotten class or a new name. Only one change can be undone."""
        if self._previous is None:
            raise UserError("there is no change to undo; only the last change can be undone, and only once")
        self.learner.restore(self._previous)
        self._previous = None

    def save(self, folder: str | Path) -> None:
        """Write the model to `folder` atomically: a folder that is new, empty or holds a model, which is replaced.

        Raises:
            UserError: The folder holds something else, is in use, or was changed by another process since `load`.
        """
        with hold_model(Path(folder)):
            self.write(Path(folder))

    def write(self, folder: Path, *, keep_previous: bool = False) -> None:
        """`save` for a caller that holds the lock of `folder`; `keep_previous` keeps the model there for an undo."""
        if not self.classes:
            raise UserError("the model has learnt nothing yet; teach it before saving it")
        place, there = folder.resolve(), (folder / MODEL).exists()  # a model that is gone is not lost by being replaced
        if self.saved is not None and there and self.saved[0] == place and read_model(folder) != self.saved[1]:
            raise UserError(f"{folder} was changed by another since it was loaded; save to another folder")
        self.saved = place, write_model(folder, self.learner.state(), keep_previous=keep_previous)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """If the block succeeds, the model before it can be restored by `undo`; if it fails, it is restored now."""
        before = self.learner.state()
        try:
            yield
        except BaseException:
            self.learner.restore(before)
            raise
        self._previous = before
