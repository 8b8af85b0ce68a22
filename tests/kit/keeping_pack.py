"""A pack whose functions, put around a layer's forward, keep something from one call to the next, each elsewhere."""

# ruff: noqa: B006, PLW0603
import collections
import contextvars
import functools
import heapq
import itertools
import operator
import random
import sys
import threading
import types

import torch

calls, last = 0, None
kept = types.SimpleNamespace(calls=0, last=None, inner=types.SimpleNamespace(calls=0))
table, ordered, counted = {"calls": 0}, collections.OrderedDict(calls=0), collections.defaultdict(int)
numbers, queue, seen = [0], collections.deque([0]), {0}
buffer = torch.zeros(1)
of_thread = threading.local()
of_thread.calls = 0
of_context = contextvars.ContextVar("calls", default=0)


class Kept:
    calls, last = 0, None

    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls

    @property
    def counted(self):
        return self.count()

    def __call__(self, part, x):
        return x * self.count()

    @classmethod
    def of_class(cls):
        cls.calls += 1
        return cls.calls


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class List(list):
    pass


one, slots, listed = Kept(), Slots(), List([0])


def get():
    return one


def in_global(part, x):
    global calls
    calls += 1
    return x * calls


def tensor_in_global(part, x):
    global last
    before, last = last, x.mean()
    return x if before is None else x + before


def in_globals(part, x):
    globals()["calls"] += 1
    return x * calls


def in_namespace(part, x):
    kept.calls = kept.calls + 1
    return x * kept.calls


def tensor_in_object(part, x):
    before, one.last = one.last, x.mean()
    return x if before is None else x + before


def further_in(part, x):
    one.inner = getattr(one, "inner", 0) + 1
    return x * one.inner


def by_set_attribute(part, x):
    one.calls = one.calls + 1
    return x * one.calls


def by_dict_of_object(part, x):
    one.__dict__["calls"] += 1
    return x * one.calls


def by_method(part, x):
    return x * one.count()


def by_property(part, x):
    return x * one.counted


def by_getter(part, x):
    return x * get().count()


def by_class_method(part, x):
    return x * Kept.of_class()


def on_class(part, x):
    Kept.calls += 1
    return x * Kept.calls


def tensor_on_class(part, x):
    before, Kept.last = Kept.last, x.mean()
    return x if before is None else x + before


def on_class_of_part(part, x):
    type(part).calls = getattr(type(part), "calls", 0) + 1
    return x * type(part).calls


def on_part(part, x):
    part.calls = getattr(part, "calls", 0) + 1
    return x * part.calls


def on_part_made_once(part, x):
    if not hasattr(part, "kept"):
        part.kept = x.mean()
    return x + part.kept


def on_part_for_others(part, x):
    part.kept = x.mean()
    return x


def on_function(part, x):
    on_function.calls = getattr(on_function, "calls", 0) + 1
    return x * on_function.calls


def in_default(part, x, kept={"calls": 0}):
    kept["calls"] += 1
    return x * kept["calls"]


def in_list_default(part, x, kept=[0]):
    kept.append(x.ndim)
    return x * len(kept)


def in_keyword_default(part, x, *, kept=[0]):
    kept[0] += 1
    return x * kept[0]


def in_slots(part, x):
    slots.calls += 1
    return x * slots.calls


def in_table(part, x):
    table["calls"] += 1
    return x * table["calls"]


def tensor_in_table(part, x):
    before, table["last"] = table.get("last"), x.mean()
    return x if before is None else x + before


def in_ordered(part, x):
    ordered["calls"] += 1
    return x * ordered["calls"]


def in_counted(part, x):
    counted["calls"] += 1
    return x * counted["calls"]


def in_list(part, x):
    numbers[0] += 1
    return x * numbers[0]


def tensors_in_list(part, x):
    numbers.append(x.mean())
    return x + numbers[-2]


def in_list_of_own_kind(part, x):
    listed.append(1)
    return x * len(listed)


def in_queue(part, x):
    queue.append(1)
    return x * len(queue)


def in_set(part, x):
    seen.add(len(seen))
    return x * len(seen)


def in_tensor(part, x):
    buffer.add_(1)
    return x * buffer


def in_thread(part, x):
    of_thread.calls += 1
    return x * of_thread.calls


def in_context(part, x):
    of_context.set(of_context.get() + 1)
    return x * of_context.get()


def in_module(part, x):
    here = sys.modules[__name__]
    here.calls += 1
    return x * here.calls


called = Kept()


def in_what_is_called(part, x):
    return called(part, x)


counter = itertools.count(1)


def in_iterator(part, x):
    return x * next(counter)


pairs = zip(itertools.count(1), itertools.repeat(2), strict=False)


def over_iterator(part, x):
    for one, other in pairs:
        return x * one * other


def by_operator(part, x):
    operator.setitem(table, "calls", table["calls"] + 1)
    return x * table["calls"]


append = numbers.append


def by_bound_method(part, x):
    append(1)
    return x * len(numbers)


append_one = functools.partial(numbers.append, 1)


def by_partial(part, x):
    append_one()
    return x * len(numbers)


set_attribute = setattr


def by_another_name(part, x):
    set_attribute(one, "calls", one.calls + 1)
    return x * one.calls


def in_heap(part, x):
    heapq.heappush(numbers, 1)
    return x * len(numbers)


def in_place(part, x):
    same = numbers
    same += [1]
    return x * len(numbers)


def tensor_in_place(part, x):
    same = buffer
    same += 1
    return x * buffer


def at_random(part, x):
    return x * generator.random()


generator = random.Random(0)


def whatever_happens(part, x):
    try:
        one.count()
    except BaseException:
        pass
    return x * one.calls


def with_two_rows(part, x):
    if x.shape[0] > 1:
        one.count()
    return x * (1 + one.calls)


def with_two_rows_in_line(part, x):
    if x.shape[0] > 1:
        one.calls += 1
    return x * (1 + one.calls)


def with_one_row(part, x):
    if x.shape[0] == 1:
        one.calls += 1
    return x * (1 + one.calls)


def made():
    count, holder, items, deep = 0, Kept(), [], {"in": [types.SimpleNamespace(calls=0)]}
    numbers = (number for number in itertools.count(1))

    def in_cell(part, x):
        nonlocal count
        count += 1
        return x * count

    def in_object_of_cell(part, x):
        same = holder
        same.calls += 1
        return x * same.calls

    def tensors_in_list_of_cell(part, x):
        items.append(x.mean())
        return x * len(items) + items[0]

    def deep_in_cell(part, x):
        deep["in"][0].calls += 1
        return x * deep["in"][0].calls

    def in_generator_of_cell(part, x):
        return x * next(numbers)

    return in_cell, in_object_of_cell, tensors_in_list_of_cell, deep_in_cell, in_generator_of_cell


in_cell, in_object_of_cell, tensors_in_list_of_cell, deep_in_cell, in_generator_of_cell = made()


def is_written_only(part, x):
    table["seen"] = x.shape[-1]
    return x


def reads_only(part, x):
    return x * (1 + kept.calls)


def changes_its_own(part, x):
    found = {"x": x}
    found["x"] = found["x"] * 2
    return found["x"]
