"""DMC-OT as a researcher writes it in an afternoon: transformers, dense covariances, MultivariateNormal, sqrtm.

`python -m benchmarks.peers.plain_dmc_ot BACKBONE PICTURES TASKS STAGE1_EPOCHS STAGE2_EPOCHS padded|cut` prints one line
of JSON: the mean loss of the last epoch of every stage, and the accuracy after every task. PICTURES has folders
train/CLASS and test/CLASS; classes come in the order of their names. Texts have the 77 tokens of CLIP ("padded"), or as
many as the longest ("cut").
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.linalg import sqrtm
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.functional import cross_entropy, normalize
from transformers import CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

BATCH, LENGTH, BETA, LAMBDA = 32, 10, 0.1, 0.1


class PlainDMCOT:
    def __init__(self, backbone: str, texts: str) -> None:
        self.clip = CLIPModel.from_pretrained(backbone).eval().requires_grad_(False)
        self.process = CLIPImageProcessor.from_pretrained(backbone)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(backbone)
        self.padded = texts == "padded"
        self.tower = nn.ModuleList([self.clip.vision_model, self.clip.visual_projection])
        self.scale = self.clip.logit_scale.exp()
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.prompts: list[nn.Parameter] = []
        self.task_prompts: list[nn.Parameter] = []
        self.means: list[Tensor] = []
        self.covariances: list[Tensor] = []

    def pictures(self, files: list[Path]) -> Tensor:
        return self.process([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]

    def encode(self, pixels: Tensor) -> Tensor:
        return normalize(self.clip.get_image_features(pixels).pooler_output, dim=-1)

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        return torch.cat([self.encode(part) for part in torch.split(pixels, BATCH)])

    def tokens(self, texts: list[str]) -> Tensor:
        ids = [
            [self.clip.config.text_config.bos_token_id, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
            for text in texts
        ]
        eos = self.clip.config.text_config.eos_token_id
        longest = 77 if self.padded else max(map(len, ids)) + 1
        return torch.tensor([row + [eos] * (longest - len(row)) for row in ids])

    def text_features(self, ids: Tensor, prompts: Tensor | None = None) -> Tensor:
        """The text tower on tokens, of which those after [SOS] are replaced by learnt vectors."""
        model = self.clip.text_model
        rows = model.embeddings.token_embedding(ids)
        if prompts is not None:
            rows = torch.cat([rows[:, :1], prompts, rows[:, 1 + LENGTH :]], dim=1)
        rows = rows + model.embeddings.position_embedding.weight[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        for layer in model.encoder.layers:
            rows = layer(rows, mask.expand(len(ids), 1, -1, -1))
        rows = model.final_layer_norm(rows)
        end = (ids == self.clip.config.text_config.eos_token_id).int().argmax(dim=-1)
        return self.clip.text_projection(rows[torch.arange(len(ids)), end])

    def classifier(self) -> tuple[Tensor, Tensor]:
        blank = "x " * LENGTH
        classes = self.text_features(self.tokens([blank + name for name in self.names]), torch.cat(list(self.prompts)))
        tasks = self.text_features(self.tokens([blank] * len(self.task_prompts)), torch.stack(list(self.task_prompts)))
        own = torch.repeat_interleave(tasks, torch.tensor(self.sizes), dim=0)
        return normalize(classes + BETA * own, dim=-1), normalize(tasks, dim=-1)

    def statistics(self, features: Tensor, labels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        means, covariances = [], []
        for label in labels.unique():
            rows = features[labels == label].double()
            means.append(rows.mean(0))
            covariances.append(torch.from_numpy(ledoit_wolf(rows.numpy())[0]))
        return means, covariances

    def learn(self, names: list[str], pixels: Tensor, labels: Tensor, epochs: tuple[int, int]) -> tuple[float, float]:
        old, width = len(self.names), self.clip.config.text_config.hidden_size
        before = self.statistics(self.features(pixels), labels) if old else None
        first = self.stage1(names, pixels, labels - old, epochs[0])
        features = self.features(pixels)
        after = self.statistics(features, labels)
        if before is not None:
            self.calibrate(before, after)
        self.names += names
        self.sizes.append(len(names))
        self.prompts.append(nn.Parameter(0.02 * torch.randn(len(names), LENGTH, width)))
        self.task_prompts.append(nn.Parameter(0.02 * torch.randn(LENGTH, width)))
        second = self.stage2(features, labels, old, epochs[1])
        self.means += after[0]
        self.covariances += after[1]
        with torch.no_grad():
            self.weights = self.classifier()[0]
        return first, second

    def stage1(self, names: list[str], pixels: Tensor, labels: Tensor, epochs: int) -> float:
        with torch.no_grad():
            texts = normalize(self.text_features(self.tokens([f"a photo of {name}" for name in names])), dim=-1)
        parameters = list(self.tower.requires_grad_(True).parameters())

        def loss(rows: Tensor) -> Tensor:
            scores = self.scale * self.encode(pixels[rows]) @ texts[labels[rows]].T
            target = torch.arange(len(rows))
            return (cross_entropy(scores, target) + cross_entropy(scores.T, target)) / 2

        value = train(parameters, loss, len(labels), epochs, lr=1e-5)
        self.tower.requires_grad_(False)
        return value

    def calibrate(self, before: tuple[list[Tensor], ...], after: tuple[list[Tensor], ...]) -> None:
        """Eq. (4): the statistics of the task before and after stage 1, averaged over its classes."""
        (mean1, cov1), (mean2, cov2) = ([torch.stack(part).mean(0) for part in both] for both in (before, after))
        root = np.real(sqrtm(cov1.numpy()))
        inverse = np.linalg.inv(root)
        matrix = torch.from_numpy(inverse @ np.real(sqrtm(root @ cov2.numpy() @ root)) @ inverse)
        self.means = [matrix @ (mean - mean1) + mean2 for mean in self.means]
        self.covariances = [matrix @ cov @ matrix.T for cov in self.covariances]

    def stage2(self, features: Tensor, labels: Tensor, old: int, epochs: int) -> float:
        share = len(labels.unique()) / len(self.names)
        count = min(512, round(BATCH * (1 - share) / share))
        gaussians = [MultivariateNormal(m, c) for m, c in zip(self.means, self.covariances, strict=True)]

        def loss(rows: Tensor) -> Tensor:
            texts, tasks = self.classifier()
            value = share * cross_entropy(self.scale * features[rows] @ texts.T, labels[rows])
            if old:
                chosen = torch.randint(old, (count,))
                replay = torch.stack([gaussians[index].sample() for index in chosen.tolist()]).float()
                scores = self.scale * normalize(replay, dim=-1) @ texts.T
                value = value + (1 - share) * cross_entropy(scores, chosen)
            gram = tasks @ tasks.T
            if len(tasks) > 1:
                value = value + LAMBDA * (gram - torch.diag(gram.diagonal())).square().sum() / (
                    len(tasks) * (len(tasks) - 1)
                )
            return value

        return train([*self.prompts, *self.task_prompts], loss, len(labels), epochs, lr=2e-3)

    def accuracy(self, files: list[Path], labels: Tensor) -> float:
        """Pictures are prepared batch by batch, so that all test pictures are never in memory at once."""
        parts = [files[start : start + BATCH] for start in range(0, len(files), BATCH)]
        features = torch.cat([self.features(self.pictures(part)) for part in parts])
        return float(((features @ self.weights.T).argmax(1) == labels).double().mean())


def train(parameters: list[nn.Parameter], loss, count: int, epochs: int, lr: float) -> float:  # type: ignore[no-untyped-def]
    """AdamW with a cosine to 0. Returns the mean loss of the last epoch."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-count // BATCH))
    for _ in range(epochs):
        values = []
        for rows in torch.split(torch.randperm(count), BATCH):
            value = loss(rows)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            values.append(float(value))
    return sum(values) / len(values)


def listed(folder: Path, classes: list[str], wanted: range) -> tuple[list[Path], Tensor]:
    found = [(file, index) for index in wanted for file in sorted((folder / classes[index]).iterdir())]
    return [file for file, _ in found], torch.tensor([index for _, index in found])


def main(backbone: str, folder: str, tasks: str, stage1: str, stage2: str, texts: str) -> None:
    torch.manual_seed(0)
    method = PlainDMCOT(backbone, texts)
    classes = sorted(path.name for path in (Path(folder) / "train").iterdir())
    size = len(classes) // int(tasks)
    losses, accuracies = [], []
    for first in range(0, len(classes), size):
        new = range(first, first + size)
        files, labels = listed(Path(folder) / "train", classes, new)
        names = [classes[index] for index in new]
        losses.append(method.learn(names, method.pictures(files), labels, (int(stage1), int(stage2))))
        accuracies.append(method.accuracy(*listed(Path(folder) / "test", classes, range(first + size))))
    print(json.dumps({"losses": losses, "accuracies": accuracies}))


if __name__ == "__main__":
    main(*sys.argv[1:])
