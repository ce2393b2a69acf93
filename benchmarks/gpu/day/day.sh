#!/usr/bin/env bash
# Measures Hotcold on a machine with a GPU, in stages with a limit each (stages.py lists them):
#
#     benchmarks/gpu/day/day.sh first                      # then: second
#     GPU=llvmpipe SMALL=1 benchmarks/gpu/day/day.sh first # a software driver, small shapes
#     benchmarks/gpu/day/day.sh device table               # named stages
#
# It needs no network and no git. What pack.sh put into .day/ ($DAY) is used; without it, what is installed here:
# Vulkan's loader, and Hotcold in $PYTHON. Results are in $OUT (default: out/day), written after every stage.
# If there is no device, it ends in the first stage with 3, and $OUT/why.txt has what is needed to find out why.
set -uo pipefail
cd "$(dirname "$0")/../../.."
export PYTHON=${PYTHON:-python3} OUT=${OUT:-$PWD/out/day} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
mkdir -p "$OUT"
day=${DAY:-$PWD/.day}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export WORK=$work

# Unpacked beside the system's own files: a mistake there would break the machine.
if compgen -G "$day/gl/*.deb" >/dev/null && ! ldconfig -p | grep -q libvulkan.so.1; then
    for file in "$day"/gl/*.deb; do dpkg -x "$file" "$work/gl"; done
    LD_LIBRARY_PATH=$(echo "$work"/gl/usr/lib/*-linux-gnu)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
nvidia=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
if [[ -z ${VK_DRIVER_FILES:-} && -f $nvidia ]] && ! compgen -G '/usr/share/vulkan/icd.d/nvidia*' >/dev/null; then
    export VK_DRIVER_FILES=$nvidia
fi
if compgen -G "$day/hotcold-*.whl" >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" \
        "$day"/hotcold-*.whl || exit 3
    cp src/hotcold/demo/*.gguf "$work/site/hotcold/demo/"
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
for name in llama layer; do
    [[ -f $day/$name.tar.xz ]] || continue
    mkdir -p "$work/$name"
    "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \
        "$day/$name.tar.xz" "$work/$name"
done
"$PYTHON" benchmarks/gpu/day/stages.py "$@"
