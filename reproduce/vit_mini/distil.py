"""`vit-mini`'s vision tower: a plain ViT, distilled towards what `mini` makes of the same pictures.

Every picture is seen in one of the two views that `mini` learnt from, as 64 × 64 pixels, mirrored and shifted at
random. What `mini` makes of a view is computed once. The losses, with f and t the features of the tower and of `mini`,
both of unit length:

    features   1 − cos(f, t)
    relations  KL divergence from t's similarities to other pictures of `mini` to f's, the mean picture taken off
    patches    1 − cosine of each patch token, mapped linearly, to `mini`'s trunk output at its place

A step reads half of the patches, except towards the end. The rate is constant and then falls linearly, so that a run
may be continued with another number of steps before the fall has begun.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clipcil.clip import CLIP
from clipcil.clip.config import VisionConfig
from clipcil.clip.preprocess import OPENAI_MEAN, OPENAI_STD
from clipcil.clip.vision import VisionTower
from clipcil.storage import whole_file
from reproduce.mini.fitting import total
from reproduce.mini.pictures import Picture, views

CONFIG = VisionConfig(width=192, layers=6, heads=3, mlp=768, activation="gelu", channels=3, image_size=64, patch_size=8)
DIM, MAP = 384, (384, 4, 4)  # mini's joint space and trunk output
SHARD, BATCH, OTHERS = 512, 128, 1024
RATE, KEEP, SHIFT = 2e-3, 0.998, 4  # the highest learning rate; of the averaged weights; in pixels
WHOLE, FALL = 0.95, 0.6  # the share of the steps before all patches are read, and before the rate falls
WEIGHTS = {"features": 2.0, "relations": 1.0, "patches": 1.0}
SAVE_EVERY, STEPS_PER_SHARD = 200, 8  # steps from one checkpoint, and from one shard, to the next


class Lessons:
    """Views and what the teacher makes of them, in shards of 512 that are computed as training goes on."""

    def __init__(self, pictures: Sequence[Picture], folder: Path, cache: Path, teacher: CLIP, seed: int) -> None:
        self.pictures, self.folder, self.cache, self.teacher, self.seed = pictures, folder, cache, teacher, seed
        cache.mkdir(parents=True, exist_ok=True)
        self.pixels = torch.zeros(len(pictures), 3, CONFIG.image_size, CONFIG.image_size, dtype=torch.uint8)
        self.maps = torch.zeros(len(pictures), *MAP, dtype=torch.float16)
        self.features = torch.zeros(len(pictures), DIM, dtype=torch.float16)
        self.known = 0

    def provide(self, count: int) -> None:
        """At least `count` views, or all there are: read from their shards or computed."""
        while self.known < min(count, len(self.pictures)):
            file = self.cache / f"{self.known // SHARD:04d}.safetensors"
            chosen = self.pictures[self.known : self.known + SHARD]
            if not file.exists():
                with whole_file(file) as half:
                    save_file(self.compute(chosen), half)
            for name, rows in load_file(file).items():
                getattr(self, name)[self.known : self.known + len(rows)] = rows
            self.known += len(chosen)

    @torch.no_grad()
    def compute(self, chosen: Sequence[Picture]) -> dict[str, Tensor]:
        seen = []
        for picture in chosen:
            rng = random.Random(f"{self.seed} {picture.file}")
            with Image.open(self.folder / picture.file) as opened:
                seen.append(rng.choice(views(opened.convert("RGB"), picture.source, rng)))
        size = (CONFIG.image_size, CONFIG.image_size)
        pixels = np.stack([np.asarray(view.resize(size, Image.Resampling.BICUBIC)) for view in seen])
        maps = self.teacher.vision.start(self.teacher.preprocess(seen))
        features = F.normalize(self.teacher.vision.encode(maps, class_only=True).features, dim=-1)
        maps = maps[:, : MAP[0]].contiguous()  # behind them the trunk packs averages
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        return {"pixels": torch.from_numpy(pixels), "maps": maps.half(), "features": features.half()}


def moved(pixels: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B, 3, h, w) uint8 → normalised, each shifted by a few pixels and mirrored or not; and (B,): was it mirrored."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_MEAN, OPENAI_STD))
    x = (pixels.float() / 255 - mean) / std
    count, side = len(x), x.shape[-1]
    mirrored = torch.randint(2, (count,), generator=draw).bool()
    down, right = torch.randint(2 * SHIFT + 1, (2, count, 1), generator=draw)
    x = F.pad(x, (SHIFT,) * 4, mode="replicate")
    across = torch.arange(side).expand(count, -1)
    across = torch.where(mirrored[:, None], side - 1 - across, across) + right
    rows = (torch.arange(side) + down)[:, None, :, None]
    return x[
        torch.arange(count)[:, None, None, None], torch.arange(3)[:, None, None], rows, across[:, None, None]
    ], mirrored


def start(seed: int) -> VisionTower:
    """Random weights; the blocks add nothing yet, and positions start as waves along both sides."""
    torch.manual_seed(seed)
    tower = VisionTower(CONFIG, DIM)
    for name, weight in tower.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02 if "embedding" in name else CONFIG.width**-0.5)
        if name.endswith(("out_proj.weight", "fc2.weight")):
            nn.init.zeros_(weight)
    side, waves = CONFIG.image_size // CONFIG.patch_size, CONFIG.width // 4
    angles = torch.arange(side)[:, None] / 100 ** (torch.arange(waves) / waves)
    line = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, width / 2)
    grid = torch.cat([line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)], dim=2)
    tower.vision_model.embeddings.position_embedding.weight.data[1:] = 0.3 * grid.flatten(0, 1)
    return tower


def optimisers(tower: VisionTower, mapping: nn.Linear) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [weight for weight in tower.vision_model.encoder.parameters() if weight.dim() > 1]
    chosen = set(matrices)
    others = [weight for part in (tower, mapping) for weight in part.parameters() if weight not in chosen]
    muon = torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)]


def losses(
    tower: VisionTower, mapping: nn.Linear, lessons: Lessons, draw: torch.Generator, whole: bool
) -> dict[str, Tensor]:
    """The three losses of a batch; `whole`: with all patches."""
    rows = torch.randint(lessons.known, (BATCH,), generator=draw)
    pixels, mirrored = moved(lessons.pixels[rows], draw)
    side, count = CONFIG.image_size // CONFIG.patch_size, CONFIG.patches
    kept = torch.arange(count) if whole else torch.randperm(count, generator=draw)[: count // 2]
    model = tower.vision_model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.pre_layrnorm(model.embeddings(pixels)[:, [0, *(kept + 1).tolist()]])
        for block in model.encoder.blocks():
            hidden = block(hidden)
        hidden = model.post_layernorm(hidden)
        features, patches = tower.visual_projection(hidden[:, 0]).float(), mapping(hidden[:, 1:]).float()
    features, wanted = F.normalize(features, dim=-1), lessons.features[rows].float()
    others = lessons.features[torch.randint(lessons.known, (OTHERS,), generator=draw)].float()
    mean = others.mean(0)
    given, known, others = (F.normalize(each - mean, dim=-1) for each in (features, wanted, others))
    believed, found = F.softmax(10 * known @ others.T, dim=-1), F.log_softmax(10 * given @ others.T, dim=-1)
    maps = lessons.maps[rows].float()
    maps = torch.where(mirrored[:, None, None, None], maps.flip(3), maps)
    step = side // MAP[1]
    places = (kept // side // step) * MAP[2] + kept % side // step
    aims = maps.flatten(2)[:, :, places].transpose(1, 2)  # (B, kept, channels)
    return {
        "features": (1 - (features * wanted).sum(-1)).mean(),
        "relations": F.kl_div(found, believed, reduction="batchmean"),
        "patches": (1 - F.cosine_similarity(patches, aims, dim=-1)).mean(),
    }


def train(lessons: Lessons, steps: int, work: Path, seed: int) -> VisionTower:
    """Train for `steps`, or go on from the checkpoint in `work`; returns the tower with averaged weights."""
    tower, mapping = start(seed), nn.Linear(CONFIG.width, MAP[0])
    average = {name: weight.detach().clone() for name, weight in tower.state_dict().items()}
    parts, made = [tower, mapping, *optimisers(tower, mapping)], 0
    file = work / "checkpoint.pt"
    if file.exists():
        kept = torch.load(file, weights_only=True)
        made, average = kept["step"], kept["average"]
        for part, state in zip(parts, kept["parts"], strict=True):
            part.load_state_dict(state)
    since = time.monotonic()
    for step in range(made, steps):
        lessons.provide(SHARD * (2 + step // STEPS_PER_SHARD))
        draw = torch.Generator().manual_seed(seed + step)
        found = losses(tower, mapping, lessons, draw, whole=step >= WHOLE * steps)
        total(found, WEIGHTS).backward()
        rate = RATE * min(1.0, (step + 1) / 100, (steps - step) / (steps - FALL * steps))
        for optimiser in parts[2:]:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad()
        with torch.no_grad():
            for name, weight in tower.state_dict().items():
                average[name].lerp_(weight, 1 - min(KEEP, (step + 1) / (step + 10)))
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            state = {"step": step + 1, "average": average, "parts": [part.state_dict() for part in parts]}
            with whole_file(file) as half:
                torch.save(state, half)
        if (step + 1) % 50 == 0:
            values = ", ".join(f"{name} {float(value.detach()):.3f}" for name, value in found.items())
            pace = (time.monotonic() - since) / (step + 1 - made)
            print(f"step {step + 1} of {steps}, {pace:.2f} s each, {lessons.known} views: {values}", flush=True)
    tower.load_state_dict(average)
    return tower
