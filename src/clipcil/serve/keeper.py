"""The served model. Every change is made on a copy, which is written atomically and then takes its place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.facts import Facts
from clipcil.classifier.model_folder import MODEL, read_previous, restore_previous
from clipcil.errors import UserError

DEFAULT_BACKBONE = "mini"


class Keeper:
    """Holds the current model of a folder. The caller holds the folder's lock."""

    def __init__(self, folder: Path, method: str | None, backbone: str | None, device: str) -> None:
        self.folder, self._backbone, self._device = folder, backbone, device
        self._changing = threading.Lock()
        self.model: Classifier | None = None
        self.revision = 0
        """Counts the changes since the start."""
        self._choices: dict[str, Any] = {} if method is None else {"method": method}
        if (folder / MODEL).exists():
            self.model = self.copy()
            if method is not None and self.model.facts().method != method:
                raise UserError(
                    f"{folder} has method '{self.model.facts().method}', not '{method}'; leave --method out"
                )
        else:
            self._new()  # says now what is wrong with the method or the backbone, not at the first lesson

    @property
    def backbone(self) -> str:
        """Where the backbone lies on this machine."""
        return self._backbone or (self.model.facts().backbone if self.model else DEFAULT_BACKBONE)

    def copy(self, folder: Path | None = None) -> Classifier:
        """The model as it lies on disk, or the one in another folder; that never chooses its own backbone."""
        backbone = self._backbone if folder is None else self.backbone
        return load(folder or self.folder, backbone=backbone, device=self._device)

    @contextmanager
    def changing(self, start: Path | None = None, keep_previous: bool = True) -> Iterator[Classifier]:
        """A copy of the model to change. If the block ends well, it is written and answers from then on.

        Args:
            start: Another model's folder to start from.
            keep_previous: Keep the previous model for `undo`; otherwise nothing of it is left.

        Raises:
            HTTPException: 409 while another change is under way.
        """
        with self._alone():
            model = self._new() if start is None and self.model is None else self.copy(start)
            yield model
            model.write(self.folder, keep_previous=keep_previous)
            self._answer_with(model)

    def undo(self) -> None:
        """Restore the model before the last change; the current one is kept in its place.

        Raises:
            HTTPException: 409 if none is kept, or while a change is under way.
        """
        with self._alone():
            if self.previous() is None:
                raise HTTPException(409, "no earlier model is kept; there is nothing to undo")
            restore_previous(self.folder)
            self._answer_with(self.copy())

    def previous(self) -> Facts | None:
        """The model before the last change, if it is kept and whole."""
        try:
            return read_previous(self.folder)
        except UserError:
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise HTTPException(409, "the model is being changed; wait for the lesson, or cancel it")
        try:
            yield
        finally:
            self._changing.release()

    def _answer_with(self, model: Classifier) -> None:
        self.model = model
        self.revision += 1

    def need(self) -> Classifier:
        """The current model.

        Raises:
            HTTPException: 409 if nothing was taught yet.
        """
        if self.model is None:
            raise HTTPException(409, "the model has learnt nothing yet; teach it first")
        return self.model

    def _new(self) -> Classifier:
        return Classifier(backbone=self.backbone, device=self._device, **self._choices)
