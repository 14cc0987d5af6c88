"""A module whose buffers take their sizes from the state that is loaded."""

from __future__ import annotations

from typing import Any

from torch import nn


class SizedByState(nn.Module):
    """An empty memory can load the state of any other: its buffers get the shapes that the state has."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, value in list(self.named_buffers(recurse=False)):
            if prefix + name in state_dict:
                setattr(self, name, value.new_empty(state_dict[prefix + name].shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
