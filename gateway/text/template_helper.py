"""Renders chat templates for the gateway; runs inside the embedded interpreter of the helper process.

Talks on file descriptor 3 in frames: 4 bytes of length (little endian), then the payload. The first
request compiles the templates, each later one renders one of them. A reply's first byte says what it
is, the rest is UTF-8 text: k the result, r the template refuses the conversation, t another failure of
the template, s a template that does not compile, m out of memory, o output over its limit, b a request
that cannot be read.
"""

import collections.abc
import datetime
import json
import os
import resource
import struct

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

CHANNEL = 3
MAX_MESSAGE = 2000


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: the conversation is not one that it renders."""


class OutputLimit(Exception):
    pass


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the assistant wrote, for training; rendering only needs its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Nothing outside a template can be changed by it, but lists it made itself may grow."""

    def is_safe_attribute(self, obj, attr, value):
        if isinstance(obj, list) and attr == "append":
            return True
        return super().is_safe_attribute(obj, attr, value)


def listed(value):
    """What json cannot write: lazy sequences such as the result of the map filter."""
    if isinstance(value, collections.abc.Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class Renderer:
    def __init__(self, request):
        self.output_limit = request["output_limit_bytes"]
        self.now = None
        self.sentinel = ""
        env = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        env.filters["tojson"] = self.tojson
        env.filters["from_json"] = self.from_json
        env.globals["raise_exception"] = self.raise_exception
        env.globals["strftime_now"] = self.strftime_now
        self.templates = {}
        for name, source in request["templates"].items():
            self.templates[name] = env.from_string(source)

    def tojson(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        text = json.dumps(
            value,
            ensure_ascii=False,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=listed,
        )
        if not ensure_ascii:
            return text
        # The sentinel must stay itself, so escaping is done here and not by json.
        escaped = (c if c < "\x80" or c == self.sentinel else json.dumps(c)[1:-1] for c in text)
        return "".join(escaped)

    def from_json(self, text):
        return json.loads(text.strip(self.sentinel) if self.sentinel else text)

    def raise_exception(self, message):
        raise Refusal(message)

    def strftime_now(self, form):
        if self.now is None:
            return datetime.datetime.now().strftime(form)
        return datetime.datetime.fromtimestamp(self.now, datetime.timezone.utc).strftime(form)

    def render(self, request):
        self.now = request["now"]
        self.sentinel = request["sentinel"]
        pieces = []
        size = 0
        for piece in self.templates[request["template"]].generate(request["variables"]):
            pieces.append(piece)
            size += len(piece)
            if size > self.output_limit:
                raise OutputLimit()
        data = "".join(pieces).encode()
        if len(data) > self.output_limit:
            raise OutputLimit()
        return data


def limit_memory(budget):
    """The address space may grow by `budget` bytes from here on."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + budget, used + budget))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_exactly(size):
    parts = []
    while size > 0:
        part = os.read(CHANNEL, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame():
    return read_exactly(struct.unpack("<I", read_exactly(4))[0])


def write_frame(kind, data):
    view = memoryview(struct.pack("<I", len(data) + 1) + kind + data)
    while view:
        view = view[os.write(CHANNEL, view) :]


def answer(renderer, frame):
    """The reply to one frame, and the renderer for the next."""
    try:
        request = json.loads(frame)
    except ValueError as error:
        return b"b", str(error), renderer
    try:
        if renderer is None:
            limit_memory(request["memory_limit_bytes"])
            return b"k", b"", Renderer(request)
        return b"k", renderer.render(request), renderer
    except Refusal as error:
        return b"r", str(error), renderer
    except jinja2.TemplateSyntaxError as error:
        return b"s", f"line {error.lineno}: {error.message}", renderer
    except MemoryError:
        return b"m", "", renderer
    except OutputLimit:
        return b"o", "", renderer
    except Exception as error:  # whatever a template can raise
        return b"t", f"{type(error).__name__}: {error}", renderer


def main():
    renderer = None
    while True:
        try:
            frame = read_frame()
        except EOFError:
            return
        kind, data, renderer = answer(renderer, frame)
        del frame
        if isinstance(data, str):
            data = data[:MAX_MESSAGE].encode(errors="replace")
        write_frame(kind, data)
        # After an allocation failure anything may be half done; the gateway starts a new helper.
        if kind == b"m" or renderer is None:
            return


main()
