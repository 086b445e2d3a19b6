"""Rules of the tree that a reader would otherwise have to remember.

  check_tree.py RULE SOURCE_ROOT BUILD_ROOT

includes   a folder includes only the folders it may depend on (STYLE: services know nothing of each other)
sizes      no file over 600 lines (kernels 800), no function over 70
headers    a source includes its own header first; a header without a source compiles alone
symbols    objects of an instruction set have no weak symbols (the linker could pick them for all), hold
           the instructions they exist for, and none of a later set
metrics    metric names follow tandem_<service>_<noun>_<unit>
paths      no absolute machine paths in the tree
format     clang-format has nothing to change
"""

import pathlib
import re
import shutil
import subprocess
import sys

COMMON = {"common/base", "common/hw", "common/tensor", "common/shm", "common/checkpoint", "common/model"}
KERNELS = {"expert_worker/kernels", "expert_worker/engine"}

# Folder -> folders it may include, besides itself.
ALLOWED = {
    "common/base": set(),
    "common/hw": {"common/base"},
    "common/rpc": {"common/base"},
    "common/tensor": {"common/base"},
    "common/shm": {"common/base", "common/hw", "common/tensor"},
    "common/checkpoint": {"common/base", "common/hw", "common/tensor"},
    "common/quantize": {"common/base", "common/tensor", "common/checkpoint"},
    "common/model": {"common/base", "common/hw", "common/tensor", "common/checkpoint"},
    "expert_worker/kernels": {"common/hw", "common/tensor"},
    "expert_worker/engine": COMMON | {"expert_worker/kernels"},
    "expert_worker": COMMON | KERNELS | {"common/rpc", "proto/worker"},
    "gpu_worker": COMMON | {"common/rpc", "proto/worker", "gpu_worker/links", "gpu_worker/backend_cpu",
                            "gpu_worker/hot_experts"},
    "gpu_worker/hot_experts": COMMON | {"gpu_worker"},
    "gpu_worker/links": COMMON | {"gpu_worker"},
    "gpu_worker/backend_cpu": COMMON | KERNELS | {"gpu_worker"},
    "gpu_worker/backend_sim": COMMON | KERNELS | {"gpu_worker", "gpu_worker/backend_cpu"},
    "gateway/text": {"common/base"},
    "gateway/scheduling": {"common/base"},
    "gateway/api": {"common/base", "gateway", "gateway/text", "proto/serving"},
    "gateway": {"common/base", "common/rpc", "common/model", "common/checkpoint",
                "gateway/text", "gateway/scheduling", "gateway/api", "proto/worker", "proto/serving"},
    "deploy/cli": COMMON | {"common/quantize", "common/rpc", "proto/worker", "proto/serving"},
}
# The one exception, by file: the assembly of the CPU backend picks its kernel table, and the in-process
# link runs the expert engine in the gpu_worker's process. Hot experts are copied out of packed stores. The memory plan asks the engine what a store takes.
EXCEPTIONS = {
    "deploy/cli/host_plan.cc": KERNELS,
    "gpu_worker/main.cc": KERNELS,
    "gpu_worker/loaded_model.h": KERNELS,
    "gpu_worker/loaded_model.cc": KERNELS,
    "gpu_worker/inprocess_experts.cc": KERNELS,
    "gpu_worker/inprocess_experts.h": KERNELS,
    "gpu_worker/hot_experts/store_experts.cc": KERNELS,
    "gpu_worker/hot_experts/store_experts.h": KERNELS,
}
# Kernels see plain data only.
KERNEL_HEADERS = {"common/hw/isa.h", "common/tensor/dtype.h", "common/tensor/weight_format.h",
                  "common/hw/cpu_features.h"}


def sources(root, suffixes=(".h", ".cc", ".inc", ".cu")):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\n"):
        path = pathlib.Path(root) / name
        if name.endswith(suffixes) and not name.startswith("tests/data/") and path.is_file():
            yield name, path.read_text()


def folder_of(name):
    parts = name.split("/")
    for depth in range(len(parts) - 1, 0, -1):
        folder = "/".join(parts[:depth])
        if folder in ALLOWED:
            return folder
    return None


def included_folder(include):
    if include.startswith("tandem/worker/"):
        return "proto/worker"
    if include.startswith("tandem/serving/"):
        return "proto/serving"
    return folder_of(include)


def check_includes(root, _build):
    for name, text in sources(root):
        folder = folder_of(name)
        if folder is None:
            continue
        allowed = ALLOWED[folder] | EXCEPTIONS.get(name, set())
        for include in re.findall(r'^#include "([^"]+)"', text, re.M):
            target = included_folder(include)
            if target is None or target == folder:
                continue
            if target not in allowed:
                yield f"{name}: {folder} may not include {include}"
            elif folder == "expert_worker/kernels" and include not in KERNEL_HEADERS:
                yield f"{name}: kernels include plain-data headers only, not {include}"


def check_sizes(root, _build):
    for name, text in sources(root):
        lines = text.split("\n")
        limit = 800 if name.startswith("expert_worker/kernels/") else 600
        if len(lines) > limit:
            yield f"{name}: {len(lines)} lines, more than {limit}"
        start = None
        for number, line in enumerate(lines, 1):
            opens = re.match(r"^[A-Za-z_~:<>\[].*[^;]$", line) and not re.match(
                r"^(namespace|class|struct|enum|union|extern|template|using|typedef)\b", line)
            if start is None and opens:
                start = number
            if line.startswith(("}", "#")) or (start and line.endswith(";") and not line.startswith(" ")):
                if start and line.startswith("}") and number - start > 70:
                    yield f"{name}:{start}: function of {number - start + 1} lines, more than 70"
                start = None
            elif line == "":
                start = start if start and lines[number - 2] != "" and start != number else start


def check_headers(root, build):
    names = {name for name, _ in sources(root)}
    flags = ["-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{root}", f"-I{build}/proto",
             '-DTANDEM_VERSION="0"'] + embed_flags()
    for name, text in sources(root):
        if name.endswith(".cc") and name[:-3] + ".h" in names:
            first = re.search(r'^#include [<"]([^>"]+)[>"]', text, re.M)
            if first and first.group(1) != name[:-3] + ".h":
                yield f"{name}: the first include must be {name[:-3]}.h, not {first.group(1)}"
        if name.endswith(".h") and name[:-2] + ".cc" not in names:
            done = subprocess.run(["g++", *flags, str(pathlib.Path(root) / name)],
                                  capture_output=True, text=True)
            if done.returncode != 0 and "simde/" not in done.stderr.splitlines()[0]:  # SIMDe is optional
                yield f"{name}: does not compile alone: {done.stderr.splitlines()[0]}"


def embed_flags():
    done = subprocess.run(["/usr/bin/python3-config", "--includes"], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


# What each object of the kernels is compiled for; all of it must be there.
INSTRUCTIONS = {
    "avx2": {"vpmaddubsw", "vfmadd231ps"},
    "avx512": {"vfmadd231ps"},
    "avx512_vnni": {"vpdpbusd", "vpdpwssd"},
    "avx512_bf16": {"vdpbf16ps"},
    "avx512_vbmi": {"vdpbf16ps"},
    "amx": {"ldtilecfg", "tileloadd", "tilestored", "tilezero", "tdpbsud", "tdpbf16ps", "tilerelease"},
}

# What only these may use.
ONLY_IN = {
    "vpdpbusd": ("avx512_vnni", "avx512_bf16", "avx512_vbmi", "amx"),
    "vpdpwssd": ("avx512_vnni", "avx512_bf16", "avx512_vbmi", "amx"),
    "vdpbf16ps": ("avx512_bf16", "avx512_vbmi", "amx"),
    "vpermi2b": ("avx512_vbmi", "amx"),
    "vpermt2b": ("avx512_vbmi", "amx"),
    "vpermb": ("avx512_vbmi", "amx"),
}


def instructions_of(path):
    listed = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)],
                            capture_output=True, text=True, check=True)
    return (set(re.findall(r"^ +[0-9a-f]+:\t(?:\{\w+\} )?(\w+)", listed.stdout, re.M)),
            "%zmm" in listed.stdout, "%ymm" in listed.stdout)


def check_symbols(_root, build):
    objects = list(pathlib.Path(build).rglob("expert_kernels.dir/*.o"))
    if not objects:
        yield "no objects of expert_kernels found: was it built?"
    for path in objects:
        name = path.name.split(".")[0]
        found, zmm, ymm = instructions_of(path)
        for missing in sorted(INSTRUCTIONS.get(name, set()) - found):
            yield f"{path.name}: no {missing}"
        for foreign in sorted(i for i in found if name not in ONLY_IN.get(i, (name,))):
            yield f"{path.name}: uses {foreign}"
        if zmm and not name.startswith(("avx512", "amx")):
            yield f"{path.name}: uses registers of AVX-512"
        if ymm and name not in INSTRUCTIONS:
            yield f"{path.name}: uses registers of AVX"
        if name != "amx" and any(i.startswith(("tile", "tdp")) for i in found):
            yield f"{path.name}: uses tiles"
        if name not in INSTRUCTIONS:
            continue
        listed = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True)
        for line in listed.stdout.split("\n"):
            if re.match(r"^[0-9a-f]+ [WwVvu] ", line):
                yield f"{path.name}: weak symbol {line.split(' ', 2)[2]}"


def check_metrics(root, _build):
    unit = r"(_seconds|_bytes|_tokens|_requests|_rows|_ratio|_info|_total|_count|_steps|_sequences|_blocks|_connections|_workers|_nodes|_pages|_cpus|_threads|_restarts|_up)$"
    for name, text in sources(root, (".cc",)):
        if name.startswith("tests/"):
            continue
        for metric in re.findall(r'"(tandem_[a-z0-9_]+[a-z0-9])"', text):
            if re.match(r"tandem_(gateway|gpu_worker|expert_worker|build)_", metric) is None:
                yield f"{name}: {metric} names no service"
            elif re.search(unit, metric) is None:
                yield f"{name}: {metric} ends in no unit"


def check_paths(root, _build):
    this = "tests/tidy/check_tree.py"
    for name, text in sources(root, (".h", ".cc", ".md", ".txt", ".py", ".sh", ".json", ".yaml", ".yml", "/run", "quickstart")):
        if name != this and re.search(r"(/work/|/root/|/home/[a-z])", text):
            yield f"{name}: absolute machine path"


def check_format(root, _build):
    if shutil.which("clang-format-14") is None:
        return
    names = [str(pathlib.Path(root) / name) for name, _ in sources(root)]
    done = subprocess.run(["clang-format-14", "--dry-run", *names], capture_output=True, text=True)
    yield from sorted({line.split(":")[0] + ": not formatted" for line in done.stderr.split("\n")
                       if "code should be clang-formatted" in line})


def main():
    rule, root, build = sys.argv[1:4]
    faults = list(globals()[f"check_{rule}"](root, build))
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
