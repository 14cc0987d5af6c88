"""`clipcil push` and `clipcil pull`: a model to and from the Hugging Face hub."""

from typing import Annotated

from cyclopts import Parameter

from clipcil.commands.types import Flag, Model
from clipcil.errors import counted, quoted

Repository = Annotated[str, Parameter(metavar="OWNER/NAME")]


def push(model: Model, repository: Repository, /, *, public: Flag = False) -> None:
    """Upload a model to the Hugging Face hub, with what it keeps of pictures; `clipcil show` says what that is.

    The token is that of `hf auth login`, or HF_TOKEN. Small pictures and the model kept for undo are not uploaded.

    For example:
      clipcil push birds/ me/birds

    Args:
        model: Folder of the model.
        repository: Its name on the hub; created, as a private one, if it does not exist.
        public: Let everybody see a new repository.
    """
    from clipcil.classifier import hub
    from clipcil.commands import text

    text.say(f"uploaded: {hub.push(model, repository, public)}", f"get it with: clipcil pull {repository} FOLDER")


def pull(repository: Repository, model: Model, /) -> None:
    """Download a model from the Hugging Face hub; a model that is there is replaced, which can be undone.

    For example:
      clipcil pull me/birds birds/
      clipcil pull me/birds@v1.0 birds/

    Args:
        repository: Its name on the hub, and behind @ a commit, a tag or a branch.
        model: Folder for the model.
    """
    from clipcil.classifier import hub
    from clipcil.commands import text

    facts = hub.pull(repository, model)
    text.say(f"{quoted(model)} knows {counted(len(facts.known), 'class', 'classes')}, on backbone {facts.backbone}")
