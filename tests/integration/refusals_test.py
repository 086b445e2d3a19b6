"""What must be refused before serving, with one clear line, and what a running server survives."""

import json
import os
import pathlib
import shutil
import socket
import struct
import tempfile
import time
import unittest

import harness
import safetensors_io


class Refusals(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="tandem-refuse-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def tiny(self):
        return harness.copy_model(harness.TINY, self.directory / "model")

    def assert_refused(self, model, *words, options=()):
        code, output = harness.refused(model, *options)
        for word in words:
            self.assertIn(word, output)
        return code

    def test_no_such_directory(self):
        self.assert_refused(self.directory / "absent", "absent")

    def test_truncated_weights_name_file_and_sizes(self):
        model = self.tiny()
        path = model / "model.safetensors"
        size = path.stat().st_size
        os.truncate(path, size - 1)
        self.assert_refused(model, "model.safetensors", str(size), str(size - 1))

    def test_missing_tensor_is_named(self):
        model = self.tiny()
        tensors = safetensors_io.read(model / "model.safetensors")
        del tensors["model.layers.3.mlp.experts.7.up_proj.weight"]
        safetensors_io.write(model / "model.safetensors", tensors)
        self.assert_refused(model, "model.layers.3.mlp.experts.7.up_proj.weight")

    def test_unsupported_dtype_is_named(self):
        model = self.tiny()
        tensors = safetensors_io.read(model / "model.safetensors")
        name = "model.layers.0.self_attn.q_proj.weight"
        _, shape, data = tensors[name]
        tensors[name] = ("I16", shape, data)
        safetensors_io.write(model / "model.safetensors", tensors)
        self.assert_refused(model, name, "I16")

    def test_nan_weight_is_refused_naming_the_tensor(self):
        for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.2.mlp.experts.5.down_proj.weight",
                     "model.embed_tokens.weight"):
            with self.subTest(name):
                shutil.rmtree(self.directory / "model", ignore_errors=True)
                model = self.tiny()
                tensors = safetensors_io.read(model / "model.safetensors")
                dtype, shape, data = tensors[name]
                tensors[name] = (dtype, shape, struct.pack("<H", 0x7FC0) + data[2:])
                safetensors_io.write(model / "model.safetensors", tensors)
                self.assert_refused(model, name)

    def test_unknown_family_lists_the_known_ones(self):
        model = self.tiny()
        config = json.loads((model / "config.json").read_text())
        config["model_type"] = "gpt_neox"
        config["architectures"] = ["GPTNeoXForCausalLM"]
        (model / "config.json").write_text(json.dumps(config))
        self.assert_refused(model, "gpt_neox", "qwen3_moe")

    def test_tokenizer_of_another_model(self):
        model = self.tiny()
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["added_tokens"].append({"id": 5000, "content": "<|alien|>", "single_word": False, "lstrip": False,
                                          "rstrip": False, "normalized": False, "special": True})
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.assert_refused(model, "tokenizer.json", "1024")

    def test_busy_port_names_it_with_an_exit_code_of_its_own(self):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            self.assertEqual(self.assert_refused(harness.TINY, str(port), options=(f"--http-port={port}",)), 3)

    def test_model_that_does_not_fit_shows_the_budget(self):
        self.assert_refused(harness.TINY, "key/value cache", options=("--kv-cache-tokens=4000000000",))

    def test_bad_option_is_a_usage_error(self):
        self.assertEqual(self.assert_refused(harness.TINY, "--max-isa", options=("--max-isa=mmx",)), 2)

    # DP-3: a Kubernetes Service named like the program.
    def test_dp_3_service_links_in_the_environment(self):
        environment = {"TANDEM_PORT": "tcp://10.0.0.7:8080", "TANDEM_SERVICE_HOST": "10.0.0.7",
                       "TANDEM_PORT_8080_TCP_ADDR": "10.0.0.7", "TANDEM_HTTP_PORT": "tcp://10.0.0.7:8080"}
        with harness.Server(harness.TINY, env=environment) as server:
            self.assertEqual(server.get("/health/ready")[0], 200)

    # NU-7: restart at once, though 20 clients are connected.
    def test_nu_7_restart_on_the_same_port_at_once(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for _ in range(4):
            with harness.Server(harness.TINY, f"--http-port={port}") as server:
                clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
                self.assertEqual(server.get("/health/live")[0], 200)
                self.assertEqual(server.stop(), 0, server.log())
            for client in clients:
                client.close()


class BadRequests(unittest.TestCase):
    """One clear error each; the server lives on."""

    @classmethod
    def setUpClass(cls):
        cls.server = harness.Server(harness.TINY, "--max-sequences=2", "--max-queue-requests=2")
        cls.pids = cls.server.children()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def tearDown(self):
        self.assertEqual(self.server.children(), self.pids)
        status, answer = self.server.post("/v1/chat/completions", harness.chat("What is 1 + 1?", temperature=0))
        self.assertEqual(status, 200, answer)

    def raw(self, body, path="/v1/chat/completions"):
        status, _, data = self.server.request("POST", path, body)
        return status, harness.strict_json(data)

    def assert_bad(self, body, param=None, status=400):
        got, answer = self.raw(body if isinstance(body, bytes) else json.dumps(body).encode())
        self.assertEqual(got, status, answer)
        self.assertEqual(answer["error"]["type"], "invalid_request_error")
        if param is not None:
            self.assertEqual(answer["error"]["param"], param)
        return answer["error"]

    def test_malformed_json_and_utf8(self):
        self.assert_bad(b"{")
        self.assert_bad(b'{"messages": ' + b"[" * 100_000)
        self.assert_bad(b'{"model":"tandem-tiny","messages":[{"role":"user","content":"\xff\xfe"}]}')

    def test_body_of_64_mib_is_refused(self):
        body = b'{"model":"tandem-tiny","prompt":"' + b"x" * (64 << 20) + b'"}'
        try:
            status, _, _ = self.server.request("POST", "/v1/completions", body)
        except (ConnectionResetError, BrokenPipeError):
            return  # answered and closed while the client still wrote
        self.assertEqual(status, 413)

    def test_prompt_over_the_context(self):
        error = self.assert_bad(harness.chat("word " * 5000))
        self.assertEqual(error["code"], "context_length_exceeded")
        self.assertIn("1024", error["message"])

    def test_sp_1_logit_bias_beyond_the_vocabulary(self):
        self.assert_bad(harness.chat("Hi", logit_bias={"9999999": 5}), "logit_bias")

    def test_sp_3_seed_beyond_64_bits(self):
        for seed in ("18446744073709551616", "-9223372036854775809"):
            self.assert_bad(b'{"model":"tandem-tiny","seed":' + seed.encode() +
                            b',"messages":[{"role":"user","content":"Hi"}]}', "seed")

    def test_sp_5_logprobs_are_finite_json(self):
        status, answer = self.server.post("/v1/chat/completions", harness.chat(
            "What is 1 + 1?", top_k=1, logprobs=True, top_logprobs=20, max_tokens=4))
        self.assertEqual(status, 200, answer)
        for token in answer["choices"][0]["logprobs"]["content"]:
            self.assertLessEqual(len(token["top_logprobs"]), 20)

    def test_sp_7_empty_stop_strings(self):
        full = self.server.post("/v1/chat/completions", harness.chat("What is 1 + 1?", temperature=0))[1]
        for stop in ([], None):
            status, answer = self.server.post("/v1/chat/completions",
                                              harness.chat("What is 1 + 1?", temperature=0, stop=stop))
            self.assertEqual(status, 200, answer)
            self.assertEqual(answer["choices"][0]["message"], full["choices"][0]["message"])
        for stop in ("", [""]):
            self.assert_bad(harness.chat("Hi", stop=stop), "stop")

    def test_sp_9_empty_prompts(self):
        status, answer = self.server.post("/v1/completions", {"model": "tandem-tiny", "prompt": ""})
        self.assertEqual((status, answer["error"]["param"]), (400, "prompt"))
        self.assertEqual(self.server.post("/v1/chat/completions", harness.chat("", max_tokens=2))[0], 200)

    def test_hc_1_unpaired_surrogate(self):
        for stream in (b"false", b"true"):
            body = b'{"model":"tandem-tiny","stream":' + stream + rb',"messages":[{"role":"user","content":"x \ud83d"}]}'
            got, answer = self.raw(body)
            self.assertEqual(got, 400, answer)
            self.assertEqual(answer["error"]["param"], "messages[0].content")

    def test_full_queue_is_429_with_retry_after(self):
        streams = [self.server.stream("/v1/chat/completions", harness.chat(
            "Tell me a story.", seed=i, ignore_eos=True, max_tokens=900)) for i in range(12)]
        refused = [stream for stream in streams if stream.status == 429]
        self.assertTrue(refused)
        for stream in refused:
            self.assertIsNotNone(stream.response.getheader("Retry-After"))
        for stream in streams:
            stream.close()
        self.assertTrue(self.server.wait_ready(10))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.server.post("/v1/chat/completions", harness.chat("What is 1 + 1?"))[0] == 200:
                return
            time.sleep(0.1)
        self.fail("the queue stays full")


if __name__ == "__main__":
    unittest.main()
