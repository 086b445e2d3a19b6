"""The shipped model's evaluation set through HTTP gives the accuracy its README states."""

import concurrent.futures
import json
import unittest

import jinja2.sandbox

import harness

# Exact-match accuracy of the reference, float32 and greedy (the model's README).
STATED = {"facts": 27.5, "addition": 100.0, "addition_think": 100.0, "lists": 97.5, "lookup": 87.5,
          "as_json": 100.0, "tool_call": 100.0}
MAX_TOKENS = 120


def questions():
    lines = (harness.TINY / "eval.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rendered(question):
    """The prompt of a question with tools, as a client that renders the template itself sends it."""
    config = json.loads((harness.TINY / "tokenizer_config.json").read_text())
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(config["chat_template"]).render(
        messages=question["messages"], tools=question["tools"], add_generation_prompt=True)


class Evaluation(unittest.TestCase):
    def ask(self, server, question):
        body = {"model": "tandem-tiny", "temperature": 0, "max_tokens": MAX_TOKENS, "skip_special_tokens": False}
        if question.get("tools"):  # the chat endpoint does not take tools yet
            status, answer = server.post("/v1/completions", {**body, "prompt": rendered(question)}, timeout=300)
            self.assertEqual(status, 200, answer)
            text = answer["choices"][0]["text"]
        else:
            body["messages"] = question["messages"]
            status, answer = server.post("/v1/chat/completions", body, timeout=300)
            self.assertEqual(status, 200, answer)
            text = answer["choices"][0]["message"]["content"]
        for end in ("<|im_end|>", "<|endoftext|>"):
            text = text.removesuffix(end)
        return text.strip()

    def check(self, server, streams):
        asked = questions()
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(lambda question: self.ask(server, question), asked))
        right, total, same = {}, {}, 0
        for question, answer in zip(asked, answers):
            task = question["task"]
            total[task] = total.get(task, 0) + 1
            right[task] = right.get(task, 0) + (answer == question["expected"].strip())
            same += answer == question["reference"].strip()
        measured = {task: 100 * right[task] / total[task] for task in total}
        print(f"{streams} streams: {measured}; {same} of {len(asked)} answers equal the reference's")
        return measured, same, len(asked)

    def test_parity_mode_gives_the_stated_accuracy_with_1_and_16_streams(self):
        with harness.Server(harness.TINY, "--parity") as server:
            for streams in (1, 16):
                measured, same, total = self.check(server, streams)
                self.assertEqual(measured, STATED)
                self.assertEqual(same, total)

    def test_default_mode_gives_the_stated_accuracy(self):
        with harness.Server() as server:
            measured, same, total = self.check(server, 16)
            for task, stated in STATED.items():
                self.assertGreaterEqual(measured[task], stated - 2.5, task)
            self.assertGreaterEqual(same, 0.97 * total)


if __name__ == "__main__":
    unittest.main()
