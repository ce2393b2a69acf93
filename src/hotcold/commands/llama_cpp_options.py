"""Options of llama.cpp that have another name here, have no effect here, or do not exist here, since users
reuse whole command lines. Options with the same name in both programs are in ``options.py`` and take
precedence."""

from typing import NamedTuple

IS = "is"  #: has another name here: the text, in which ``{}`` is the value
NOTHING = "nothing"  #: accepted; the text says why it has no effect
NO = "no"  #: refused; the text says what to do instead

_GPU = "a GPU is filled automatically: --vram-budget SIZE sets a limit, --gpu off turns it off"
_CHOOSE = "--gpu NAME|INDEX chooses a GPU; hotcold doctor lists them"
_FILE = "it is read from the model's file"
_READ = "weights are always read into memory, never mapped"
_OWN = "it is handled automatically"
_CORES = "threads run on the cores that the process may use: start it with taskset -c"
_ORDER = "their order is fixed (docs/http_api.md); --top-k 0, --top-p 1 or --min-p 0 turns one off"
_OFF = "it is off"
_SAMPLING = "this way of sampling is not supported: leave it out"
_TEXT = "models read only text: leave it out"
_DRAFT = "draft tokens come from prompt lookup: --draft-max N limits them, --no-draft turns them off"
_NO_DRAFT = "this command drafts no tokens"
_FORMAT = "hotcold serve takes grammars and schemas with each request (docs/grammar.md)"
_CHAT = "hotcold chat is for conversations, hotcold generate for one text"
_SHIFT = "a text ends when the context is full"
_LOG = "notes and figures go to stderr: 2> FILE saves them"
_KEY = "give keys in --api-key-file FILE or $HOTCOLD_API_KEY, which other users cannot see"
_MANY = "a server has one model: start another server on another port"


class Row(NamedTuple):
    """Options of the commands that run a model, or of those in ``verbs``. If several rows have one option,
    the first whose ``when`` matches the whole value counts."""

    names: str
    takes: str  #: the value in words; with ``|`` one of these words, which may be left out; empty: none
    outcome: str
    text: str
    when: str = ".*"
    verbs: str = ""


ROWS = (
    # where the model is
    Row("-hf -hfr --hf-repo", "REPO", IS, "-m hf:{}"),
    Row("-hff --hf-file", "FILE", NO, "name the file in -m hf:OWNER/NAME/FILE.gguf"),
    Row("-hft --hf-token", "TOKEN", NO, "set HF_TOKEN in the environment, which other users cannot see"),
    Row("-mu --model-url", "URL", NO, "download the file, or give -m hf:OWNER/NAME/FILE.gguf"),
    Row("--offline", "", NO, "set HF_HUB_OFFLINE=1 in the environment"),
    # GPUs
    Row("-ngl --gpu-layers --n-gpu-layers", "N", IS, "--gpu off", "0"),
    Row("-ngl --gpu-layers --n-gpu-layers", "N", NOTHING, _GPU),
    Row("-mg --main-gpu", "INDEX", NOTHING, _CHOOSE, "0"),
    Row("-mg --main-gpu", "INDEX", NO, _CHOOSE),
    Row("-dev --device", "NAME", IS, "--gpu off", "none"),
    Row("-dev --device", "NAME", NO, _CHOOSE),
    Row("--list-devices", "", NO, "hotcold doctor lists them"),
    Row("-sm --split-mode", "MODE", NOTHING, "each GPU of --gpu 0,1 computes a run of layers"),
    Row("-ts --tensor-split", "N", NO, "give each GPU its budget: --gpu 0,1 --vram-budget 20GiB,10GiB"),
    Row("-ot --override-tensor", "PATTERN", NO, "hotcold plan writes a file for --placement FILE"),
    Row("-cmoe --cpu-moe", "", NOTHING, _GPU),
    Row("-ncmoe --n-cpu-moe -ncffn --n-cpu-ffn", "N", NOTHING, _GPU),
    Row("-kvo --kv-offload -nkvo --no-kv-offload", "", NOTHING, _GPU),
    Row("-fit --fit", "on|off", NOTHING, _GPU),
    Row("--op-offload --no-op-offload --no-host", "", NOTHING, _OWN),
    # how it computes
    Row("-fa --flash-attn", "on|off|auto|1|0", NOTHING, "attention is computed in one way"),
    Row("-tb --threads-batch", "N", NOTHING, "-t also sets the threads for prompts"),
    Row("-b --batch-size -ub --ubatch-size", "N", NOTHING, _OWN),
    Row("--mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io", "", NOTHING, _READ),
    Row("-lm --load-mode", "MODE", NOTHING, _READ),
    Row("--numa", "TYPE", NOTHING, "weights are spread over NUMA nodes automatically"),
    Row("-C --cpu-mask -Cb --cpu-mask-batch", "MASK", NO, _CORES),
    Row("-Cr --cpu-range -Crb --cpu-range-batch", "RANGE", NO, _CORES),
    Row("--prio --poll --cpu-strict --prio-batch --poll-batch --cpu-strict-batch", "N", NOTHING, _OWN),
    Row("--repack -nr --no-repack --check-tensors --warmup --no-warmup --swa-full", "", NOTHING, _OWN),
    Row("-dt --defrag-thold -ctxcp --ctx-checkpoints --swa-checkpoints", "N", NOTHING, _OWN),
    Row("-kvu --kv-unified -no-kvu --no-kv-unified", "", NOTHING, "requests share one cache"),
    Row("-cram --cache-ram", "N", NOTHING, "--cache-positions of hotcold serve limits the cache"),
    Row("--keep", "N", NOTHING, _SHIFT),
    Row("--no-context-shift", "", NOTHING, _SHIFT),
    Row("--context-shift", "", NO, f"{_SHIFT}: give a larger -c"),
    # what belongs to the model
    Row("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", "X", NO, _FILE),
    Row("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor", "X", NO, _FILE),
    Row("--yarn-beta-slow --yarn-beta-fast", "X", NO, _FILE),
    Row("--override-kv", "KEY=TYPE:VALUE", NO, _FILE),
    Row("--lora --lora-scaled --control-vector", "FILE", NO, "merge it into the checkpoint first"),
    Row("--spec-draft-model", "FILE", IS, "--draft {}", verbs="generate chat serve"),
    Row("-hfd --spec-draft-hf", "REPO", IS, "--draft hf:{}", verbs="generate chat serve"),
    Row("--draft-n --spec-draft-n-max", "N", IS, "--draft-max {}", verbs="generate chat serve bench"),
    Row("-md --model-draft --spec-draft-model -hfd --spec-draft-hf", "X", NOTHING, _NO_DRAFT),
    Row("--spec-type", "X", NO, _DRAFT),
    Row("--draft --draft-max --draft-n --spec-draft-n-max", "N", NOTHING, _NO_DRAFT),
    Row("--draft-min --spec-draft-n-min", "N", NOTHING, "the number of draft tokens adapts to the speed"),
    Row("-mm --mmproj -mmu --mmproj-url --image --audio --video", "FILE", NO, _TEXT),
    Row("--no-mmproj --mmproj-auto --mmproj-offload --no-mmproj-offload", "", NOTHING, _TEXT),
    # how tokens are chosen
    Row("--samplers --sampler-seq --sampling-seq", "NAMES", NO, _ORDER),
    Row("--mirostat --xtc-probability --dry-multiplier --dynatemp-range", "X", NOTHING, _OFF, r"0(\.0+)?"),
    Row("--typical --typical-p", "X", NOTHING, _OFF, r"1(\.0+)?"),
    Row("--top-nsigma --top-n-sigma --adaptive-target", "X", NOTHING, _OFF, r"-1(\.0+)?"),
    Row("--mirostat --xtc-probability --dry-multiplier --dynatemp-range", "X", NO, _SAMPLING),
    Row("--typical --typical-p", "X", NO, _SAMPLING),
    Row("--top-nsigma --top-n-sigma --adaptive-target --adaptive-decay", "X", NO, _SAMPLING),
    Row("--mirostat-lr --mirostat-ent --xtc-threshold --dry-base --dynatemp-exp", "X", NO, _SAMPLING),
    Row("--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker", "X", NO, _SAMPLING),
    Row("-bs --backend-sampling", "", NOTHING, _OWN),
    Row("--grammar --grammar-file -j --json-schema -jf --json-schema-file", "X", NO, _FORMAT),
    # conversations and texts
    Row("-cnv --conversation -i --interactive -if --interactive-first", "", NO, _CHAT, verbs="generate"),
    Row("-cnv --conversation -i --interactive -if --interactive-first", "", NOTHING, _CHAT, verbs="chat"),
    Row("-no-cnv --no-conversation", "", NOTHING, _CHAT, verbs="generate"),
    Row("-no-cnv --no-conversation", "", NO, _CHAT, verbs="chat"),
    Row("-st --single-turn", "", NOTHING, "hotcold generate ends after its text", verbs="generate"),
    Row("-st --single-turn", "", NO, "give one message: echo TEXT | hotcold chat", verbs="chat"),
    Row("-mli --multiline-input", "", NOTHING, 'put """ around a message of several lines', verbs="chat"),
    Row("-p --prompt", "TEXT", NO, "type it, or echo TEXT | hotcold chat", verbs="chat"),
    Row("-f --file", "FILE", NO, "hotcold chat < FILE, with one message per line", verbs="chat"),
    Row("-sys --system-prompt", "TEXT", NO, "hotcold chat has it", verbs="generate"),
    Row("-sysf --system-prompt-file", "FILE", NO, 'hotcold chat -sys "$(cat FILE)"', verbs="generate chat"),
    Row("-bf --binary-file", "FILE", NO, "-f FILE reads UTF-8", verbs="generate"),
    Row("-e --escape", "", NOTHING, r"texts are used as they are: in a shell $'a\nb' has a line break"),
    Row("--no-escape", "", NOTHING, "texts are used as they are"),
    Row("--in-prefix --in-suffix", "TEXT", NO, "write it into the text"),
    Row("--prompt-cache", "FILE", NO, "computed prompts are kept only in memory"),
    Row("--prompt-cache-all --prompt-cache-ro", "", NO, "computed prompts are kept only in memory"),
    Row("--special", "", NO, "hotcold tokenize shows tokens", verbs="chat serve bench"),
    Row("-sp --verbose-prompt", "", NO, "hotcold tokenize shows tokens"),
    Row("--display-prompt", "", NOTHING, "it is shown unless --no-display-prompt is given", verbs="generate"),
    Row("--simple-io", "", IS, "--plain", verbs="generate chat"),
    Row("-co --color", "on|off|auto", NOTHING, "NO_COLOR=1 turns colours off"),
    Row("--perf --no-perf --show-timings --no-show-timings", "", NOTHING, _LOG),
    Row("--log-verbose --log-disable --log-prefix --log-timestamps", "", NOTHING, _LOG),
    Row("--no-log-prefix --no-log-timestamps", "", NOTHING, _LOG),
    Row("-lv --verbosity --log-verbosity", "N", NOTHING, _LOG),
    Row("--log-colors", "on|off|auto", NOTHING, _LOG),
    Row("--log-file", "FILE", NO, _LOG),
    # templates
    Row("--jinja", "", NOTHING, "templates are always rendered by Jinja"),
    Row("--no-jinja", "", NO, "templates are always rendered by Jinja: leave it out"),
    Row("--chat-template-kwargs", "JSON", NO, "use chat_template_kwargs in requests, /set in hotcold chat"),
    Row("-rea --reasoning", "on|off|auto", NO, "use chat_template_kwargs in requests, /set in hotcold chat"),
    Row("--reasoning-format", "NAME", NOTHING, "thinking is returned as reasoning_content", "auto|deepseek"),
    Row("--reasoning-format", "NAME", NO, "thinking is returned as reasoning_content: leave it out"),
    Row("--reasoning-budget", "N", NOTHING, "there is none", "-1", "generate chat"),
    Row("--reasoning-budget", "N", NO, "-n limits thinking and answer together", verbs="generate chat"),
    # the server
    Row("--api-key", "KEY", NO, _KEY, verbs="serve"),
    Row("--cors-origins", "ORIGIN", IS, "--cors-origin {}", "[^,]+", "serve"),
    Row("--cors-origins", "ORIGINS", NO, "give --cors-origin once for each origin", verbs="serve"),
    Row("--cors-methods --cors-headers", "NAMES", NO, "all are allowed: leave it out", verbs="serve"),
    Row("-cb --cont-batching", "", NOTHING, "requests always share steps", verbs="serve"),
    Row("-nocb --no-cont-batching", "", NO, "-np 1 runs one at a time", verbs="serve"),
    Row("--metrics --props", "", NOTHING, "/metrics and /props are always available", verbs="serve"),
    Row("--slots --no-slots", "", NOTHING, "/slots is always available, without prompts", verbs="serve"),
    Row("--ssl-key-file --ssl-cert-file", "FILE", NO, "put a proxy in front (docs/deploy.md)", verbs="serve"),
    Row("--path --api-prefix", "PATH", NO, "set it in a proxy in front (docs/deploy.md)", verbs="serve"),
    Row("--ui --webui --no-ui --no-webui", "", NOTHING, "the page is always at /", verbs="serve"),
    Row("--embedding --embeddings", "", NOTHING, "/v1/embeddings is always available", verbs="serve"),
    Row("--rerank --reranking", "", NO, "only texts and embeddings are served", verbs="serve"),
    Row("--threads-http --cache-reuse -sps --slot-prompt-similarity", "N", NOTHING, _OWN, verbs="serve"),
    Row("--cache-prompt", "", NOTHING, "prompts are always cached", verbs="serve"),
    Row("--no-cache-prompt", "", NO, "set cache_prompt to false in requests", verbs="serve"),
    Row("--slot-save-path", "PATH", NO, "computed prompts are kept only in memory", verbs="serve"),
    Row("--models-dir --models-preset --models-max", "X", NO, _MANY, verbs="serve"),
)  # fmt: skip


def table() -> str:
    """Returns the table in Markdown, for the documentation."""
    outcomes = {IS: "the same as", NOTHING: "no effect:", NO: "refused:"}
    lines = ["| option of llama.cpp | here |", "|---|---|"]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        value = f" `{row.takes}`".replace("|", "\\|") if row.takes else ""
        which = "" if row.when == ".*" else f", where it is `{row.when}`".replace("|", "\\|")
        verbs = f" ({', '.join(row.verbs.split())})" if row.verbs else ""
        text = f"`{row.text.format(row.takes)}`" if row.outcome == IS else row.text.replace("|", "\\|")
        lines.append(f"| {names}{value}{which}{verbs} | {outcomes[row.outcome]} {text} |")
    return "\n".join(lines)
