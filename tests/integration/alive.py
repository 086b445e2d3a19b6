"""What belongs to every trial: the server is the same as before, answers, and has lost no KV block."""

import time


def free_blocks(server):
    return {name: value for name, value in server.metrics().items() if name.startswith("tandem_gateway_kv_free_blocks")}


class Alive:
    """Made when the server has started; `check` is for the end of each test."""

    def __init__(self, server):
        self.server = server
        self.processes = server.children()
        self.blocks = free_blocks(server)

    def check(self, test):
        test.assertEqual(self.server.children(), self.processes, self.server.log())
        status, answer = self.server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
        test.assertEqual(status, 200, answer)
        deadline = time.monotonic() + 5
        while free_blocks(self.server) != self.blocks and time.monotonic() < deadline:
            time.sleep(0.05)
        test.assertEqual(free_blocks(self.server), self.blocks)
