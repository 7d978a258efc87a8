from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from foredraft.kv_cache import KVCache
from worlds import ModelWorld, ToyWorld, World

# Derandomised, so that a green run is green again; no deadline, since timing never decides a test.
settings.register_profile("foredraft", deadline=None, derandomize=True)
settings.load_profile("foredraft")


# Thousands of runs through code that other tests cover too: counting their lines makes them take twice as long.
UNCOUNTED = ("test_exactness", "test_enumeration", "test_random_options", "test_controller_world")


def pytest_configure() -> None:
    # Test processes that run side by side get a processor each: threads of passes wait for each other by spinning.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--offline", action="store_true", help="skip the tests that need a model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith(UNCOUNTED):
            item.add_marker(pytest.mark.no_cover)
    # Only on request: a model that cannot be fetched must fail the suite, or a green run would have proved less than it says.
    if not config.getoption("--offline"):
        return
    skip = pytest.mark.skip(reason="--offline: needs a model")
    for item in items:
        if item.get_closest_marker("model"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def every_cache_is_sound_after_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches: list[weakref.ref[KVCache]] = []
    construct = KVCache.__init__

    def construct_and_remember(self: KVCache, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(KVCache, "__init__", construct_and_remember)
    yield
    for cache in caches:
        alive = cache()
        if alive is not None:
            alive.check_integrity()


@pytest.fixture(autouse=True)
def torch_has_as_many_threads_as_before() -> Iterator[None]:
    # A model that was opened with more threads than there are processors would slow down every test behind it.
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    # Tiny products gain nothing from threads and wait for each other on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_world() -> ModelWorld:
    return ModelWorld()


@pytest.fixture(scope="session")
def toy_world() -> ToyWorld:
    return ToyWorld()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    chosen: World = request.getfixturevalue("toy_world" if request.param == "toy" else "model_world")
    return chosen
