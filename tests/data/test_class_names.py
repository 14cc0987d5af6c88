import pytest
import torch

from clipcil.data.dataset import Dataset
from clipcil.data.names import LONGEST_NAME, check_names, check_template, clean_name
from clipcil.data.pictures import PictureSet
from support.errors import one_line
from support.made_up import refused


@pytest.mark.parametrize(
    ("raw", "options", "said"),
    [
        ("aquarium_fish", {}, "aquarium fish"),
        ("  two \t words\n", {}, "two words"),
        ("T-shirt", {}, "T-shirt"),
        ("Black-footed_Albatross", {"hyphens": True}, "Black footed Albatross"),
        ("ApplyEyeMakeup", {"camel": True}, "Apply Eye Makeup"),
        ("UCFSport", {"camel": True}, "UCF Sport"),
        ("iPhone", {}, "iPhone"),
        ("cafe\u0301", {}, "café"),
        ("🐱", {}, "🐱"),
    ],
)
def test_names_are_cleaned(raw: str, options: dict[str, bool], said: str) -> None:
    assert clean_name(raw, **options) == said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "no classes"),
        (["cat", "   "], "class 1"),
        (["cat", "\u200b"], "class 1"),
        (["Cat", "dog", "cat"], "'Cat' and 'cat'"),
        (["cat", "cat\u200b"], "'cat' and 'cat\\u200b'"),
        (["x" * 500], "(500 characters)"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused_in_one_line(names: list[str], said: str) -> None:
    with one_line(said):
        check_names("mine", names)


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "a {} {", "}{}", "{0}", "{{}}"])
def test_a_sentence_has_one_place_for_the_name(template: str) -> None:
    check_template("a photo of a {}.")
    with one_line(template):
        check_template(template)


def test_emoji_and_long_names_within_the_limit_are_let_through() -> None:
    flags = [f"\U0001f3f4{''.join(chr(0xE0000 + ord(letter)) for letter in of)}\U000e007f" for of in ("gbeng", "gbsct")]
    check_names("mine", ["🐱", "🐶", "ß", "x" * LONGEST_NAME, *flags])


def test_a_label_outside_the_classes_is_refused() -> None:
    pictures = PictureSet("mine", [b"", b""], torch.tensor([0, 2]), "x")
    with one_line("2 classes"):
        Dataset("mine", ["a", "b"], pictures, pictures)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("cifar10", {}, "'cifar100'"), ("cub200", {"splt": "x"}, "'split'"), ("emoji", {"split": "x"}, "no options")],
)
def test_unknown_datasets_and_options_name_the_nearest(name: str, options: dict[str, str], said: str) -> None:
    refused(name, said, None, **options)
