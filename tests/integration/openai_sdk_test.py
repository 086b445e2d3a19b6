"""The official `openai` Python SDK against a whole server: chat, streaming, completions, models, errors,
and clients that leave."""

import asyncio
import tempfile
import unittest

import harness

try:
    import openai
except ImportError:
    openai = None

RUNNING = "tandem_gateway_running_sequences"
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


def write_key(file):
    file.write("secret\n")
    file.flush()
    return file.name


@unittest.skipIf(openai is None, "the openai package is not installed")
class OpenAiSdk(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = harness.Server()
        cls.base_url = f"http://127.0.0.1:{cls.server.http_port}/v1"
        cls.client = openai.OpenAI(base_url=cls.base_url, api_key="none", max_retries=0, timeout=60)
        cls.model = cls.client.models.list().data[0].id

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.server.stop()

    def chat(self, **fields):
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": MESSAGES, "temperature": 0, **fields})

    def test_models(self):
        card = self.client.models.retrieve(self.model)
        self.assertEqual(card.id, self.model)
        self.assertEqual(card.object, "model")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("absent")

    def test_chat(self):
        answer = self.chat()
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertIn("42", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreaterEqual(usage.prompt_tokens_details.cached_tokens, 0)

    def test_stream_equals_whole(self):
        whole = self.chat()
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual([c.choices[0].finish_reason for c in chunks if c.choices][-1], "stop")
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
        self.assertEqual({c.id for c in chunks}, {chunks[0].id})

    def test_stream_helper(self):
        with self.client.chat.completions.stream(model=self.model, messages=MESSAGES, temperature=0) as stream:
            for _ in stream:
                pass
            self.assertIn("42", stream.get_final_completion().choices[0].message.content)

    def test_choices_and_logprobs(self):
        answer = self.chat(n=2, temperature=1, seed=1, logprobs=True, top_logprobs=3, max_tokens=4)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        for choice in answer.choices:
            for entry in choice.logprobs.content:
                self.assertEqual(len(entry.top_logprobs), 3)
                self.assertLessEqual(entry.logprob, 0)
                self.assertEqual(bytes(entry.bytes).decode("utf-8", "replace"), entry.token)
        again = self.chat(n=2, temperature=1, seed=1, logprobs=True, top_logprobs=3, max_tokens=4)
        self.assertEqual([c.message.content for c in again.choices], [c.message.content for c in answer.choices])

    def test_completions(self):
        def complete(**fields):
            return self.client.completions.create(**{"model": self.model, "temperature": 0, "max_tokens": 5, **fields})

        text = complete(prompt="What is", logprobs=2, echo=True)
        choice = text.choices[0]
        self.assertTrue(choice.text.startswith("What is"))
        self.assertIsNone(choice.logprobs.token_logprobs[0])
        self.assertEqual(len(choice.logprobs.tokens), len(choice.logprobs.token_logprobs))
        self.assertEqual(len(choice.logprobs.tokens), text.usage.total_tokens)
        many = complete(prompt=["What is", "Who is"])
        self.assertEqual(len(many.choices), 2)
        ids = complete(prompt=[[5, 6, 7], [8]], extra_body={"return_token_ids": True})
        self.assertEqual(ids.choices[0].model_extra["prompt_token_ids"], [5, 6, 7])
        streamed = "".join(c.choices[0].text for c in complete(prompt="What is", stream=True))
        self.assertEqual("What is" + streamed, choice.text)

    def test_errors(self):
        with self.assertRaises(openai.NotFoundError) as unknown:
            self.chat(model="absent")
        self.assertEqual(unknown.exception.code, "model_not_found")
        self.assertTrue(unknown.exception.request_id)
        with self.assertRaises(openai.BadRequestError) as hot:
            self.chat(temperature=-1)
        self.assertEqual(hot.exception.param, "temperature")
        with self.assertRaises(openai.BadRequestError) as long:
            self.chat(messages=[{"role": "user", "content": "x " * 5000}])
        self.assertEqual(long.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.BadRequestError):
            self.chat(stream=True, tools=[{"type": "function", "function": {"name": "f"}}])

    def test_leaving_a_stream_frees_its_place(self):
        stream = self.chat(stream=True, max_tokens=900, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertEqual(self.server.wait_metric(RUNNING, 0), 0)
        self.assertIn("42", self.chat().choices[0].message.content)

    def test_many_async_streams(self):
        async def ask(client):
            text = ""
            async for chunk in await client.chat.completions.create(
                    model=self.model, messages=MESSAGES, temperature=0, stream=True):
                text += chunk.choices[0].delta.content or ""
            return text

        async def ask_all():
            async with openai.AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0,
                                          timeout=60) as client:
                return await asyncio.gather(*(ask(client) for _ in range(8)))

        for text in asyncio.run(ask_all()):
            self.assertIn("42", text)

    def test_key_is_required_where_one_is_set(self):
        with tempfile.NamedTemporaryFile("w") as keys, \
                harness.Server(harness.TINY, f"--api-key-file={write_key(keys)}") as server:
            base_url = f"http://127.0.0.1:{server.http_port}/v1"
            with self.assertRaises(openai.AuthenticationError):
                openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
            self.assertTrue(openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0).models.list().data)


if __name__ == "__main__":
    unittest.main()
