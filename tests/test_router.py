"""Several servers as one sampler, and rollouts that keep to their adapter. Servers are fakes of the
Sampler: which one is asked, what happens when one fails, is all there is to see."""

import asyncio
import json

import pytest

from router import ATTEMPTS, Router, Stale
from sampler import ServerLost


class FakeSampler:
    """Answers its name; holds requests while `gate` is closed; fails while `broken`."""

    retry_count = generated_tokens = 0
    down_since = None
    max_attempts = None
    timeout_s = 1.0

    def __init__(self, url, adapter=None):
        self.url, self.adapter, self.max_model_len = url, adapter, 100
        self.asked, self.broken, self.has = [], False, "0"
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self):
        pass

    async def close(self):
        pass

    async def sample(self, prompt_ids, version):
        self.asked.append(version)
        if self.broken:
            raise ServerLost(f"{self.url} is gone")
        await self.gate.wait()
        return self.url

    def model_name(self, version):
        return self.adapter.format(version=version)

    async def read(self, path):
        if self.broken:
            return None
        if path == "/v1/models":
            return json.dumps({"data": [{"id": self.has}]})
        return json.dumps({"weight_version": self.has}) if path == "/weight_info" else self.url


def run(test):
    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("router.LOOK_S", 0.02)


def test_the_least_loaded_server_is_asked():
    async def test():
        one, two = FakeSampler("one"), FakeSampler("two")
        router = Router([one, two], lambda: 0, 1)
        one.gate.clear(), two.gate.clear()
        requests = [asyncio.create_task(router.sample([1])) for _ in range(6)]
        await asyncio.sleep(0.01)
        assert (len(one.asked), len(two.asked)) == (3, 3)
        two.gate.set()  # its requests end, so it gets the next ones
        await asyncio.sleep(0.01)
        two.gate.clear()
        requests += [asyncio.create_task(router.sample([1])) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert (len(one.asked), len(two.asked)) == (3, 6)
        one.gate.set(), two.gate.set()
        assert len(await asyncio.gather(*requests)) == 9

    run(test)


def test_a_server_that_fails_is_left_out_until_it_answers_with_the_current_weights():
    async def test():
        one, two = FakeSampler("one"), FakeSampler("two")
        version = 0
        router = Router([one, two], lambda: version, 1)
        await router.start()
        assert one.max_attempts == ATTEMPTS  # so that a request moves on soon
        one.broken = True
        assert [await router.sample([1]) for _ in range(4)] == ["two"] * 4
        assert len(one.asked) == 1  # nothing was lost, and it was not asked again
        assert router.retry_count == 1
        version, two.has = 1, "1"
        for has in ("default", "0"):  # restarted, or left out of a sync
            one.broken, one.has = False, has
            await asyncio.sleep(0.1)
            assert [await router.sample([1]) for _ in range(4)] == ["two"] * 4
        one.has = "1"
        await asyncio.sleep(0.1)
        assert {await router.sample([1]) for _ in range(2)} == {"one"}  # both are idle: the first
        version, two.has = 2, "2"  # a server that missed a sync goes out without a request
        await asyncio.sleep(0.1)
        assert {await router.sample([1]) for _ in range(4)} == {"two"}
        await router.close()

    run(test)


def test_requests_wait_while_no_server_is_there_but_not_for_ever():
    async def test():
        one, two = FakeSampler("one"), FakeSampler("two")
        router = Router([one, two], lambda: 0, 1)
        await router.start()
        one.broken = two.broken = True
        request = asyncio.create_task(router.sample([1]))
        await asyncio.sleep(0.2)
        assert not request.done()
        two.broken = False
        assert await request == "two"
        two.broken = True
        with pytest.raises(ServerLost, match="none of the vLLM servers answers"):
            await router.sample([1])
        await router.close()

    run(test)


def test_a_request_that_no_server_can_answer_fails_in_time_though_they_answer_others():
    async def test():
        router = Router([FakeSampler("one"), FakeSampler("two")], lambda: 0, 1)

        async def refuse(prompt_ids, version):
            raise ServerLost("not this one")

        for sampler in router.samplers:
            sampler.sample = refuse
        await router.start()  # which lets both in again, time after time
        with pytest.raises(TimeoutError, match="no server answered a request; not this one"):
            await router.sample([1])
        await router.close()

    run(test)


def test_one_server_is_waited_for_by_its_own_sampler():
    async def test():
        one = FakeSampler("one")
        one.broken = True
        router = Router([one], lambda: 0, 1)
        await router.start()
        with pytest.raises(ServerLost, match="one is gone"):
            await router.sample([1])
        assert one.max_attempts is None and not router.out

    run(test)


def test_metrics_of_all_servers_are_read_together():
    async def test():
        router = Router([FakeSampler("one"), FakeSampler("two")], lambda: 0, 1)
        assert await router.read("/metrics") == "one\ntwo"
        router.samplers[0].broken = True
        assert await router.read("/metrics") == "two"
        router.samplers[1].max_model_len = 50
        assert router.max_model_len == 50 and router.down_since is None

    run(test)


def test_a_rollout_keeps_to_its_adapter_for_max_staleness_syncs_and_is_stopped_then():
    async def test():
        server = FakeSampler("one", adapter="v{version}")
        version = 3
        router = Router([server], lambda: version, max_staleness=2)
        seen = []

        async def rollout(turns):
            router.pin()
            for _ in range(turns):
                await router.sample([1], version)  # what the caller says is the newest, not its own
                seen.append(server.asked[-1])
                await asyncio.sleep(0.01)

        server.gate.clear()
        old = asyncio.create_task(rollout(2))
        between = asyncio.create_task(rollout(1))
        await asyncio.sleep(0.01)
        version = 5  # two syncs on: both go on
        assert router.stop_stale() == 3
        new = asyncio.create_task(rollout(1))
        await asyncio.sleep(0.01)
        assert server.asked == [3, 3, 5] and router.stop_stale() == 3
        version = 6  # three: they are stopped, the new one is not
        router.stop_stale()
        for task in (old, between):
            with pytest.raises(Stale):
                await task
        assert router.stop_stale() == 5  # now version 3 may go
        server.gate.set()
        await new
        assert seen == [5] and router.stop_stale() == 6

    run(test)


def test_a_turn_is_not_begun_under_an_adapter_that_is_gone():
    async def test():
        server = FakeSampler("one", adapter="v{version}")
        version = 0
        router = Router([server], lambda: version, max_staleness=1)
        router.pin()
        await router.sample([1])
        version = 2
        with pytest.raises(Stale):
            await router.sample([1])
        assert server.asked == [0]
        router.pin()  # a second try of the rollout begins anew
        await router.sample([1])
        assert server.asked == [0, 2]

    run(test)


def test_a_rollout_that_is_cancelled_for_another_reason_is_not_stale():
    async def test():
        server = FakeSampler("one", adapter="v{version}")
        server.gate.clear()
        router = Router([server], lambda: 0, max_staleness=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await router.sample([1])
        assert router.stop_stale() == 0 and not router.load[server]

    run(test)
