"""Processes die and stop under load: noticed within two seconds, one clear error a stream, restarted."""

import os
import signal
import threading
import time
import unittest

import harness

NOTICE_SECONDS = 2.0
TERMINAL = "error"


class Load:
    """Streams that generate until something ends them; records how each ended."""

    def __init__(self, server, count):
        self.ends = [None] * count
        self.ended_at = [None] * count
        self.started = threading.Barrier(count + 1)
        self.threads = [threading.Thread(target=self._run, args=(server, i), daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()
        self.started.wait(30)

    def _run(self, server, i):
        stream = server.stream("/v1/chat/completions", harness.chat(
            f"Tell me story {i}.", temperature=1, seed=i, ignore_eos=True, max_tokens=900))
        waited = False
        errors = 0
        try:
            for chunk in stream:
                if "error" in chunk:
                    errors += 1
                elif not waited:
                    waited = True
                    self.started.wait(30)
            self.ends[i] = "done" if stream.done else f"errors {errors}"
        except OSError as error:
            self.ends[i] = f"connection: {type(error).__name__}"
        except Exception as error:  # noqa: BLE001 - whatever the stream did is the result
            self.ends[i] = f"connection: {error!r}"
        self.ended_at[i] = time.monotonic()

    def join(self, seconds):
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0, deadline - time.monotonic()))
        return all(not thread.is_alive() for thread in self.threads)


def answers(server, test):
    status, answer = server.post("/v1/chat/completions", harness.chat("What is 17 + 25?", temperature=0))
    test.assertEqual(status, 200, answer)
    test.assertIn("42", answer["choices"][0]["message"]["content"])


def free_blocks(server):
    metrics = server.metrics()
    return {name: value for name, value in metrics.items() if "kv_blocks" in name or "running" in name}


class Faults(unittest.TestCase):
    def setUp(self):
        self.server = harness.Server()
        self.addCleanup(self.server.stop)
        answers(self.server, self)
        time.sleep(0.3)
        self.idle = free_blocks(self.server)

    def strike(self, program, number):
        load = Load(self.server, 3)
        pid = self.server.pid_of(program)
        struck = time.monotonic()
        os.kill(pid, number)
        self.assertTrue(load.join(15), f"streams hang: {load.ends}\n{self.server.log()}")
        for end, at in zip(load.ends, load.ended_at):
            self.assertEqual(end, "errors 1", load.ends)
            self.assertLess(at - struck, NOTICE_SECONDS + 0.5)
        self.assertTrue(self.server.wait_ready(20), self.server.log())
        answers(self.server, self)
        self.assertNotEqual(self.server.pid_of(program), pid)
        self.assert_nothing_leaked()

    def assert_nothing_leaked(self):
        deadline = time.monotonic() + 5
        while free_blocks(self.server) != self.idle and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(free_blocks(self.server), self.idle)
        self.assertEqual([name for name in os.listdir("/dev/shm") if "tandem" in name], [])

    def test_gpu_worker_killed(self):
        self.strike("tandem-gpu-worker", signal.SIGKILL)

    def test_gpu_worker_stopped(self):
        self.strike("tandem-gpu-worker", signal.SIGSTOP)

    def test_expert_worker_killed(self):
        self.strike("tandem-expert-worker", signal.SIGKILL)
        # Its weights were kept: the new one attached to them.
        self.assertIn("reattached=yes", self.server.log())

    def test_expert_worker_stopped(self):
        self.strike("tandem-expert-worker", signal.SIGSTOP)

    def test_gateway_killed(self):
        load = Load(self.server, 2)
        pid = self.server.pid_of("tandem-gateway")
        ports = self.server.bound_ports()
        os.kill(pid, signal.SIGKILL)
        self.assertTrue(load.join(10))
        for end in load.ends:
            self.assertTrue(end.startswith("connection") or end == "errors 0", load.ends)
        # The ports that it was free to pick are kept: clients reconnect to where they were.
        self.assertTrue(self.server.wait_ready(20), self.server.log())
        answers(self.server, self)
        self.assertNotEqual(self.server.pid_of("tandem-gateway"), pid)
        self.assertEqual(self.server.bound_ports(), ports)

    def test_client_that_leaves_frees_its_blocks(self):
        streams = [self.server.stream("/v1/chat/completions", harness.chat(
            "Tell me a story.", temperature=1, seed=i, ignore_eos=True, max_tokens=900)) for i in range(3)]
        for stream in streams:
            next(iter(stream))
            stream.close()
        self.assert_nothing_leaked()


class SupervisorDeath(unittest.TestCase):
    # DP-1: the supervisor is killed; nothing outlives it and a new start works at once.
    def test_dp_1_children_end_with_the_supervisor(self):
        server = harness.Server()
        pids = [pid for group in server.children().values() for pid in group]
        self.assertEqual(len(pids), 3)
        load = Load(server, 2)
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 5
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([pid for pid in pids if os.path.exists(f"/proc/{pid}")], [])
        self.assertTrue(load.join(10))
        server.stop()
        with harness.Server() as again:
            answers(again, self)


if __name__ == "__main__":
    unittest.main()
