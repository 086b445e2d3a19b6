"""Trials of checkpoints and hub configs (CK) and of quantized formats (QF), named after their ids."""

import json
import pathlib
import shutil
import tempfile
import unittest

import alive
import golden_client
import harness
import safetensors_io

TRIALS = harness.SHARED / "trials"


def edit_config(model, change):
    config = json.loads((model / "config.json").read_text())
    change(config)
    (model / "config.json").write_text(json.dumps(config, indent=1))


def split_in_two(model):
    """model.safetensors as two shards of four that an index names; returns the index's path."""
    tensors = safetensors_io.read(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {"metadata": {}, "weight_map": {}}
    for shard, part in ((1, names[:len(names) // 2]), (2, names[len(names) // 2:])):
        file = f"model-{shard:05}-of-00004.safetensors"
        safetensors_io.write(model / file, {name: tensors[name] for name in part})
        index["weight_map"].update({name: file for name in part})
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if harness.golden("llama") is None:
            raise unittest.SkipTest("no golden models beside the project")

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="tandem-trial-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def copy(self, family):
        return harness.copy_model(harness.golden(family), self.directory / family)

    def assert_one_line_names(self, model, *words):
        """Refused, and one line of the output has all the words."""
        _, output = harness.refused(model)
        self.assertTrue(any(all(word in line for word in words) for line in output.split("\n")),
                        f"no line with {words} in\n{output}")

    def test_ck_1_tied_embeddings_without_an_output_tensor(self):
        model = self.copy("qwen3_moe")
        tensors = safetensors_io.read(model / "model.safetensors")
        del tensors["lm_head.weight"]
        safetensors_io.write(model / "model.safetensors", tensors)
        edit_config(model, lambda config: config.update(tie_word_embeddings=True))
        reference = golden_client.expected("qwen3_moe")
        embedding = safetensors_io.rows(tensors["model.embed_tokens.weight"])
        logits = [[sum(a * b for a, b in zip(hidden, row)) for row in embedding]
                  for hidden in safetensors_io.rows(reference["seq0.final_norm"])]
        with golden_client.serve(model) as server:
            got, _ = golden_client.score(server, safetensors_io.values(reference["seq0.ids"]))
        golden_client.assert_logits(self, got, logits, "tied")

    def test_ck_3_index_that_speaks_of_more_shards(self):
        model = self.copy("mixtral")
        index = split_in_two(model)
        with golden_client.serve(model) as server:
            golden_client.assert_golden(self, server, "mixtral", golden_client.expected("mixtral"), ("seq1",))
        stale = json.loads(index.read_text())
        name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
        self.assertIn(name, stale["weight_map"])
        stale["weight_map"][name] = "model-00003-of-00004.safetensors"
        index.write_text(json.dumps(stale))
        self.assert_one_line_names(model, "model-00003-of-00004.safetensors", name)

    # The other half of the trial needs the gpt_oss family, which is not served yet.
    def test_ck_5_both_spellings_of_the_rope_scaling_type(self):
        model = self.copy("deepseek_v3")
        edit_config(model, lambda config: config["rope_scaling"].update(rope_type="yarn"))
        with golden_client.serve(model) as server:
            golden_client.assert_golden(self, server, "deepseek_v3", golden_client.expected("deepseek_v3"), ("seq0",))
            log = server.log().lower()
        for word in ("unknown key", "rope_type", "unrecognized"):
            self.assertNotIn(word, log)

    def test_ck_7_end_ids_of_the_generation_config(self):
        model = self.copy("qwen3_moe")
        reference = golden_client.expected("qwen3_moe")
        steps = safetensors_io.values(reference["seq0.greedy.ids"])
        self.assertEqual(steps[:4], [254, 243, 185, 232])
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 232]}))
        body = {"model": "", "prompt": safetensors_io.values(reference["seq0.ids"]), "max_tokens": 24,
                "temperature": 0, "return_token_ids": True}
        with golden_client.serve(model) as server:
            still_alive = alive.Alive(server)
            status, whole = server.post("/v1/completions", body)
            self.assertEqual(status, 200, whole)
            streamed, reason, usage = [], None, None
            stream = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
            for chunk in stream:
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    streamed += choice.get("token_ids", [])
                    reason = choice["finish_reason"] or reason
            stream.close()
            still_alive.check(self)
        choice = whole["choices"][0]
        self.assertEqual(choice["finish_reason"], "stop")
        # The end id itself may be listed among the ids, but is no part of the answer.
        self.assertIn(choice["token_ids"], (steps[:3], steps[:4]))
        self.assertNotIn("232", choice["text"])
        self.assertEqual((streamed, reason), (choice["token_ids"], "stop"))
        for figure in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertEqual(usage[figure], whole["usage"][figure])

    def test_ck_9_interrupted_downloads(self):
        if not TRIALS.is_dir():
            self.skipTest("no trials beside the project")
        for file, expected_bytes in (("truncated_by_one.safetensors", 8 + 55 + 16),
                                     ("header_past_end.safetensors", 8 + 4096)):
            with self.subTest(file):
                shutil.rmtree(self.directory / "mixtral", ignore_errors=True)
                model = self.copy("mixtral")
                split_in_two(model)
                shard = model / "model-00002-of-00004.safetensors"
                shutil.copyfile(TRIALS / file, shard)
                self.assert_one_line_names(model, shard.name, str(expected_bytes), str(shard.stat().st_size))

    def test_ck_11_gguf_files_of_a_hundred_bytes(self):
        for file, words in (("zero_dim.gguf", ("'t.weight'", "dimension 1 is 0")),
                            ("align_zero.gguf", ("'general.alignment'", "is 0"))):
            with self.subTest(file):
                if not (TRIALS / file).is_file():
                    self.skipTest("no trials beside the project")
                self.assert_one_line_names(TRIALS / file, file, *words)

    def test_ck_13_absent_scale_of_the_routed_experts(self):
        reference = golden_client.expected("deepseek_v2")
        ids = safetensors_io.values(reference["seq1.ids"])
        changes = {"absent": lambda config: config.pop("routed_scaling_factor"),
                   "null": lambda config: config.update(routed_scaling_factor=None),
                   "one": lambda config: config.update(routed_scaling_factor=1.0)}
        found = {}
        for name, change in changes.items():
            shutil.rmtree(self.directory / "deepseek_v2", ignore_errors=True)
            model = self.copy("deepseek_v2")
            edit_config(model, lambda config: (change(config), config.pop("scoring_func")))
            with golden_client.serve(model) as server:
                found[name] = golden_client.score(server, ids)
        self.assertEqual(found["absent"], found["one"])
        self.assertEqual(found["null"], found["one"])
        with self.assertRaises(AssertionError):  # the golden factor is 4
            golden_client.assert_logits(self, found["one"][0], safetensors_io.rows(reference["seq1.logits"]), "")
        self.check_scale_of_zero(self.copy_with_scale_of_zero())

    def copy_with_scale_of_zero(self):
        shutil.rmtree(self.directory / "deepseek_v2", ignore_errors=True)
        model = self.copy("deepseek_v2")
        edit_config(model, lambda config: config.update(routed_scaling_factor=0))
        return model

    def check_scale_of_zero(self, model):
        try:
            with golden_client.serve(model) as server:
                output = server.log()
        except harness.StartError as error:
            output = error.output
        self.assertIn("routed_scaling_factor", output)

    # What the file holds decides, not the list of modules.
    def test_qf_5_exclusion_lists_that_forget_the_router(self):
        def patterns(quantization):
            quantization["modules_to_not_convert"] = ["re:.*gate$", "lm_head"]

        def dynamic(quantization):
            del quantization["modules_to_not_convert"]
            quantization["dynamic"] = {"-:.*mlp.gate.*": {}}

        reference = golden_client.expected("qwen3_moe_fp8")
        for name, change in (("empty", lambda quantization: quantization.update(modules_to_not_convert=[])),
                             ("patterns", patterns), ("dynamic", dynamic)):
            with self.subTest(name):
                shutil.rmtree(self.directory / "qwen3_moe_fp8", ignore_errors=True)
                model = self.copy("qwen3_moe_fp8")
                edit_config(model, lambda config: change(config["quantization_config"]))
                with golden_client.serve(model) as server:
                    golden_client.assert_golden(self, server, "qwen3_moe_fp8", reference, ("seq0",))


if __name__ == "__main__":
    unittest.main()
