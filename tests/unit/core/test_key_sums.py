"""Sets of attempts are compared by sums: which parts differ is found whatever came and went before."""

from __future__ import annotations

import random

from farsight.core.key_sums import NUM_PARTS, KeySums, part_of


def test_sums_tell_the_parts_in_which_sets_differ_whatever_came_and_went() -> None:
    rng = random.Random(1)
    one, two = KeySums(), KeySums()
    kept: dict[str, int] = {}
    for _ in range(3000):
        name, attempt = f"i-{rng.randrange(400)}", rng.randrange(3)
        if rng.random() < 0.5:
            one.put(name, attempt)
            kept[name] = attempt
        else:
            one.discard(name)
            kept.pop(name, None)
    assert dict(one.all_keys()) == kept
    for name in sorted(kept):
        two.put(name, kept[name])
    assert one.packed() == two.packed() and one.differing(two.packed()) == ()
    changed = sorted(kept)[:3]
    two.discard(changed[0])
    two.put(changed[1], 7)
    two.put("new", 0)
    assert set(one.differing(two.packed())) == {part_of(changed[0]), part_of(changed[1]), part_of("new")}
    assert (changed[2], kept[changed[2]]) in set(one.keys([part_of(changed[2])]))


def test_sums_of_another_form_differ_everywhere() -> None:
    assert KeySums().differing(b"") == tuple(range(NUM_PARTS))
