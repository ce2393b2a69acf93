#!/usr/bin/env bash
# Makes .day/ beside the tree: what a machine with a GPU, without network and perhaps without git, needs for
# day.sh. Refuses more than 62 MiB, tree and folder together.
#
#     benchmarks/gpu/day/pack.sh                 # builds the wheel with $PYTHON (3.12 or later: one for all)
#     WHEEL=dist/hotcold.whl benchmarks/gpu/day/pack.sh
#
# What this machine cannot make is named and left out: the stages that need it say so on the day.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-python3}
most=$((62 << 20))
peer=cyllama-vulkan==0.7.0  # llama.cpp's libraries with Vulkan, of October 2026
day=$PWD/.day
left_out=()
rm -rf "$day"
mkdir -p "$day/gl"
git describe --always --dirty >"$day/commit"

# The wheel without the built-in model, which the tree has.
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
if [[ -z ${WHEEL:-} ]]; then
    "$PYTHON" -m pip wheel -q --no-deps -w "$temporary" .
    WHEEL=$(echo "$temporary"/hotcold-*.whl)
fi
"$PYTHON" - "$WHEEL" "$day" <<'PY'
import sys
import zipfile
from pathlib import Path

source, day = map(Path, sys.argv[1:])
with zipfile.ZipFile(source) as old, zipfile.ZipFile(day / source.name, "w", zipfile.ZIP_LZMA) as new:
    for item in old.infolist():
        data = old.read(item)
        if item.filename.endswith("RECORD"):
            data = b"".join(line for line in data.splitlines(keepends=True) if b"hotcold/demo/fable" not in line)
        if not item.filename.startswith("hotcold/demo/fable"):
            new.writestr(item, data, zipfile.ZIP_DEFLATED, 9)
PY

# Vulkan's loader, and the libraries that NVIDIA's driver opens besides.
(cd "$day/gl" && apt-get -q download libvulkan1 libegl1 libglvnd0 libopengl0 libgl1 libglx0 libgles2 \
    libx11-6 libxext6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0 >/dev/null 2>"$temporary/apt") ||
    left_out+=("loader: $(tail -1 "$temporary/apt")")

# llama.cpp, without what reads images and sound.
if "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_35_x86_64 --platform manylinux_2_31_x86_64 -d "$temporary" "$peer" 2>"$temporary/pip"; then
    "$PYTHON" - "$temporary"/cyllama*.whl "$day/llama.tar.xz" <<'PY'
import io
import sys
import tarfile
import zipfile

unused = ("cyllama/sd/", "cyllama/whisper/", "cyllama/rag/vector", "cyllama/llama/server/embedded")
with zipfile.ZipFile(sys.argv[1]) as wheel, tarfile.open(sys.argv[2], "w:xz") as packed:
    for item in wheel.infolist():
        if item.is_dir():
            continue
        binary = item.filename.endswith(".so") or ".so." in item.filename
        if item.filename.startswith(unused) and (binary or "/sd/" in item.filename):
            continue
        entry = tarfile.TarInfo(item.filename)
        entry.size, entry.mode = item.file_size, 0o755
        packed.addfile(entry, io.BytesIO(wheel.read(item)))
PY
else
    left_out+=("llama.cpp: $(tail -1 "$temporary/pip")")
fi

# A validation layer, with a manifest that names it in its own folder.
layer=/usr/lib/chromium/libVkLayer_khronos_validation.so
if [[ -f $layer ]]; then
    tar -C "$(dirname $layer)" -cJf "$day/layer.tar.xz" "$(basename $layer)"
else
    left_out+=("validation layer: install Debian's chromium-common")
fi

# Bounds of CUDA, for cards from Turing to Blackwell.
if command -v nvcc >/dev/null; then
    targets=()
    for each in 75 80 86 89 90 120; do targets+=(-gencode "arch=compute_$each,code=sm_$each"); done
    nvcc -O3 -std=c++17 -cudart static "${targets[@]}" -o "$day/cuda_bounds" benchmarks/gpu/day/cuda_bounds.cu \
        >"$temporary/nvcc" 2>&1 || left_out+=("cuda_bounds: $(tail -1 "$temporary/nvcc")")
else
    left_out+=("cuda_bounds: nvcc is not installed")
fi

# The results that take the op table's model longest. They hold for this commit alone, so the wheel makes them.
expected() {
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$temporary/site" "$day"/hotcold-*.whl &&
        PYTHONPATH=$temporary/site "$PYTHON" benchmarks/gpu/op_table.py --write-expected "$day/expected.npz" \
            --most-mb "${EXPECTED_MB:-4}" --jobs "$(nproc)"
}
if [[ ${EXPECTED_MB:-4} != 0 ]]; then
    expected 2>"$temporary/expected" || left_out+=("expected.npz: $(tail -1 "$temporary/expected")")
fi

tree=$(git ls-files -co --exclude-standard -z | xargs -0 du -cb | tail -1 | cut -f1)
kit=$(du -sb "$day" | cut -f1)
du -ab "$day" | sort -n | tail -30
for each in "${left_out[@]}"; do echo "left out: $each"; done
echo "tree $((tree >> 20)) MiB + .day $((kit >> 20)) MiB = $(((tree + kit) >> 20)) MiB of $((most >> 20))"
if ((tree + kit > most)); then
    echo "pack.sh: more than $((most >> 20)) MiB: use a smaller EXPECTED_MB, or remove files from .day" >&2
    exit 1
fi
