"""Layers are grouped so that blocks waste little: every layer has a place of its own, with others of its window."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.layer_kinds import HeadSizes, LayerKind, group_kinds, group_layers

GEMMA_3_27B = [None if index % 6 == 5 else 1024 for index in range(62)]
LONG = 32_768


def held_tokens(windows, num_layers, max_model_len):
    """Tokens of one layer that a longest sequence holds, over all groups."""
    return num_layers * sum(max_model_len if window is None else min(window, max_model_len) for window in windows)


def test_layers_that_see_equally_far_are_one_group() -> None:
    for window in (None, 16):
        groups = group_layers([window] * 7, LONG)
        assert groups.windows == (window,)
        assert (groups.num_layers, groups.places) == (7, tuple((0, i) for i in range(7)))


def test_a_window_that_holds_every_sequence_is_none() -> None:
    groups = group_layers([None, 64, 100, 64], 64)
    assert (groups.windows, groups.num_layers) == ((None,), 4)
    assert groups.places == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_layers_that_alternate_are_two_groups() -> None:
    groups = group_layers([128, None] * 3, LONG)
    assert (groups.windows, groups.num_layers) == ((None, 128), 3)
    assert groups.places == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))


@pytest.mark.parametrize("max_model_len", [LONG, 131_072])
def test_five_windows_to_one_global_layer_hold_a_fifth(max_model_len: int) -> None:
    groups = group_layers(GEMMA_3_27B, max_model_len)
    assert (groups.num_layers, groups.windows) == (10, (None, *[1024] * 6))
    assert held_tokens(groups.windows, groups.num_layers, max_model_len) < 0.2 * 62 * max_model_len


def test_stacks_that_are_scanned_are_each_in_one_group_and_in_order() -> None:
    stacks = [*[list(range(i, 60, 6)) for i in range(6)], [60], [61]]
    groups = group_layers(GEMMA_3_27B, LONG, stacks)
    assert groups.num_layers == 10
    for stack in stacks:
        begin = groups.places[stack[0]]
        assert [groups.places[layer] for layer in stack] == [(begin[0], begin[1] + i) for i in range(len(stack))]


def test_a_layer_with_several_places_is_in_consecutive_groups() -> None:
    """So a layer with a window wastes no memory of those without one, whose heads are as large as the pool's."""
    wide, full = LayerKind(AttentionKind(1.0, 64), heads=HeadSizes(4, 16, 2)), LayerKind(AttentionKind(1.0))
    groups = group_kinds([wide, wide, full] * 2, LONG)
    assert (groups.windows, groups.num_layers) == ((None, 64, 64, 64, 64), 2)
    assert groups.places == ((1, 0), (1, 1), (0, 0), (3, 0), (3, 1), (0, 1))


def test_a_layer_that_attends_to_the_keys_of_another_has_its_place() -> None:
    own = [LayerKind(AttentionKind(1.0, 64)), LayerKind(AttentionKind(1.0))]
    shared = [dataclasses.replace(kind, kv_source=index) for index, kind in enumerate(own)]
    groups = group_kinds([*own, *shared, shared[0]], LONG)
    assert (groups.windows, groups.num_layers) == ((None, 64), 1)
    assert groups.places == ((1, 0), (0, 0), (1, 0), (0, 0), (1, 0))


LAYERS = st.lists(st.sampled_from([None, None, 8, 64, 1000]), min_size=1, max_size=40)


@pytest.mark.long
@given(LAYERS, st.sampled_from([8, 100, 5000]), st.randoms(use_true_random=False))
def test_every_layer_has_a_place_of_its_own_and_little_is_wasted(windows, max_model_len, random) -> None:
    layers = list(range(len(windows)))
    alike: dict[int | None, list[int]] = {}
    for layer in layers:
        alike.setdefault(windows[layer], []).append(layer)
    units = []
    for same in alike.values():
        cuts = sorted(random.sample(range(1, len(same)), random.randint(0, len(same) - 1)))
        units += [same[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(same)], strict=True)]
    for chosen in (None, units):
        groups = group_layers(windows, max_model_len, chosen)
        assert groups == group_layers(windows, max_model_len, chosen)
        assert len(set(groups.places)) == len(windows)
        assert all(0 <= place < groups.num_layers for _, place in groups.places)
        assert {group for group, _ in groups.places} == set(range(len(groups.windows)))
        for layer, (group, _) in enumerate(groups.places):
            window = windows[layer]
            assert groups.windows[group] == (None if window is None or window >= max_model_len else window)
        assert list(groups.windows) == sorted(groups.windows, key=lambda window: -(window or 1 << 40))
    alone = [max_model_len if window is None else min(window, max_model_len) for window in windows]
    groups = group_layers(windows, max_model_len)
    assert held_tokens(groups.windows, groups.num_layers, max_model_len) <= 1.05 * sum(alone)
    for unit in units:
        group, first = group_layers(windows, max_model_len, units).places[unit[0]]
        assert [group_layers(windows, max_model_len, units).places[layer] for layer in unit] == [
            (group, first + i) for i in range(len(unit))
        ]
