"""A pack whose functions, put around a layer's forward, keep something from one call to the next, each elsewhere.

A function is called with (part, x): the layer, and what it gave. The module is loaded anew for each run.
"""

# ruff: noqa: B006, F401
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
kept = types.SimpleNamespace(calls=0)
table = {"calls": 0}
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


one, slots = Kept(), Slots()
called = Kept()
counter = itertools.count(1)
pairs = zip(itertools.count(1), itertools.repeat(2), strict=False)
append = numbers.append
append_one = functools.partial(numbers.append, 1)
generator = random.Random(0)


WAYS = {
    "in_global": ["global calls", "calls += 1", "x * calls"],
    "tensor_in_global": ["global last", "before, last = last, x.mean()", "x if before is None else x + before"],
    "in_globals": ["globals()['calls'] += 1", "x * calls"],
    "in_namespace": ["kept.calls = kept.calls + 1", "x * kept.calls"],
    "tensor_in_object": ["before, one.last = one.last, x.mean()", "x if before is None else x + before"],
    "by_dict_of_object": ["one.__dict__['calls'] += 1", "x * one.calls"],
    "by_method": ["x * one.count()"],
    "by_property": ["x * one.counted"],
    "by_class_method": ["x * Kept.of_class()"],
    "on_class": ["Kept.calls += 1", "x * Kept.calls"],
    "on_class_of_part": ["type(part).calls = getattr(type(part), 'calls', 0) + 1", "x * type(part).calls"],
    "on_part": ["part.calls = getattr(part, 'calls', 0) + 1", "x * part.calls"],
    "on_part_for_others": ["part.kept = x.mean()", "x"],
    "on_function": ["on_function.calls = getattr(on_function, 'calls', 0) + 1", "x * on_function.calls"],
    "in_slots": ["slots.calls += 1", "x * slots.calls"],
    "in_table": ["table['calls'] += 1", "x * table['calls']"],
    "in_list": ["numbers[0] += 1", "x * numbers[0]"],
    "tensors_in_list": ["numbers.append(x.mean())", "x + numbers[-2]"],
    "in_queue": ["queue.append(1)", "x * len(queue)"],
    "in_set": ["seen.add(len(seen))", "x * len(seen)"],
    "in_tensor": ["buffer.add_(1)", "x * buffer"],
    "in_thread": ["of_thread.calls += 1", "x * of_thread.calls"],
    "in_context": ["of_context.set(of_context.get() + 1)", "x * of_context.get()"],
    "in_module": ["here = sys.modules[__name__]", "here.calls += 1", "x * here.calls"],
    "in_what_is_called": ["called(part, x)"],
    "in_iterator": ["x * next(counter)"],
    "by_operator": ["operator.setitem(table, 'calls', table['calls'] + 1)", "x * table['calls']"],
    "by_bound_method": ["append(1)", "x * len(numbers)"],
    "by_partial": ["append_one()", "x * len(numbers)"],
    "in_heap": ["heapq.heappush(numbers, 1)", "x * len(numbers)"],
    "in_place": ["same = numbers", "same += [1]", "x * len(numbers)"],
    "at_random": ["x * generator.random()"],
    "is_written_only": ["table['seen'] = x.shape[-1]", "x"],
    "reads_only": ["x * (1 + kept.calls)"],
    "changes_its_own": ["found = {'x': x}", "found['x'] = found['x'] * 2", "found['x']"],
}
"""Name of a function → its statements, and what it returns."""

for _name, (*_statements, _result) in WAYS.items():
    _text = "\n    ".join([f"def {_name}(part, x):", *_statements, f"return {_result}"])
    globals()[_name] = types.FunctionType(compile(_text, __file__, "exec").co_consts[0], globals())


# Those that take more than a line or two


def on_part_made_once(part, x):
    if not hasattr(part, "kept"):
        part.kept = x.mean()
    return x + part.kept


def in_default(part, x, kept={"calls": 0}):
    kept["calls"] += 1
    return x * kept["calls"]


def over_iterator(part, x):
    for one, other in pairs:
        return x * one * other


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
