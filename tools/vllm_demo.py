"""vLLM answers a real prompt, ends, and a fresh vLLM goes on from what is left of the store: `make vllm-demo`.

SmolLM2 reads 2,500 tokens of the standard library's source. The first engine process computes them and saves their KV
blocks on twelve local node servers. Then it is gone, and so are two nodes: their server is killed, their directories
are removed. A second engine process loads the prefix from the other ten, computes only what is behind it, and must
say the same, token for token. Needs an environment with vLLM (`make test-engines` makes one); exit code 1 when
anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from efs.nodedir import written_pid
from efs.osio import SystemIo
from kvstore.demo.conversation import user_additions
from kvstore.demo.model import load_tokenizer, prepare
from kvstore.demo.source import MODEL_NAME, cache_root, gguf_path
from kvstore.localset import start, stop
from kvstore.store import KVStore

CAPACITY: Final = 4 << 30
LOST_NODES: Final = 2
NEW_TOKENS: Final = 48
MOST_TOKENS: Final = 4096
PROCESS_DEADLINE_S: Final = 1200
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                      "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", nargs=2, metavar=("REQUEST", "ANSWER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer is not None:
        answer(Path(arguments.answer[0]), Path(arguments.answer[1]))
        return 0
    base = Path(tempfile.mkdtemp(prefix="kvdemo"))
    try:
        return conduct(base)
    finally:
        if (base / "kv" / "store.toml").exists():
            stop(str(base / "kv"))
        shutil.rmtree(base, ignore_errors=True)


def conduct(base: Path) -> int:
    model = prepare(gguf_path(), cache_root()).directory
    tokenizer = load_tokenizer(model)
    prompt = user_additions(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), 1)[0]
    root = str(base / "kv")
    start(root, CAPACITY)
    print(f"{MODEL_NAME} in vLLM, {len(prompt):,} tokens of prompt, twelve node servers at {root}")

    cold = engine_process(base, model, prompt, root)
    show("first engine process", cold, tokenizer)
    print(f"the first engine process has ended; the store has {records(root):,} shards")
    lose_nodes(root)
    print(f"{LOST_NODES} of 12 nodes are gone: their server killed, their directories removed")
    warm = engine_process(base, model, prompt, root)
    show("second engine process", warm, tokenizer)

    same = cold["tokens"] == warm["tokens"]
    loaded = cold["cached"] == 0 and warm["cached"] > 0
    print("same answer, token for token" if same else "THE ANSWERS DIFFER")
    if not loaded:
        print("THE SECOND PROCESS LOADED NOTHING")
    return 0 if same and loaded else 1


def engine_process(base: Path, model: Path, prompt: list[int], root: str) -> dict[str, Any]:
    """What a fresh engine says; it has ended when this returns."""
    request, result = base / "request.json", base / "answer.json"
    request.write_text(json.dumps({"model": str(model), "prompt": prompt, "store": root}))
    log = base / "engine.log"
    with log.open("wb") as out:
        code = subprocess.run(
            [sys.executable, __file__, "--answer", str(request), str(result)], env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=PROCESS_DEADLINE_S, check=False,
        ).returncode
    if code != 0:
        sys.exit(f"the engine process failed (exit code {code}):\n{log.read_text(errors='replace')[-3000:]}")
    said: dict[str, Any] = json.loads(result.read_text())
    return said


def answer(request: Path, result: Path) -> None:
    """In the engine's process."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    given = json.loads(request.read_text())
    llm = LLM(
        given["model"], skip_tokenizer_init=True, enforce_eager=True, max_model_len=MOST_TOKENS, dtype="bfloat16",
        disable_log_stats=False, prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector", kv_connector_module_path="kvstore.connectors.vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": os.path.join(given["store"], "cluster.toml")},
        ),
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, detokenize=False)
    (said,) = llm.generate([{"prompt_token_ids": given["prompt"]}], sampling, use_tqdm=False)
    result.write_text(json.dumps({
        "tokens": list(said.outputs[0].token_ids), "cached": said.num_cached_tokens,
        "first_token_s": said.metrics.first_token_latency,
    }))


def show(who: str, said: dict[str, Any], tokenizer: Any) -> None:
    print(f"{who}: {said['cached']:,} tokens loaded, first token after {said['first_token_s']:.2f} s")
    print(f"    {tokenizer.decode(said['tokens'])!r}")


def records(root: str) -> int:
    with KVStore.blocking(os.path.join(root, "cluster.toml")) as store:
        return sum(node.records for node in store.nodes())


def lose_nodes(root: str) -> None:
    nodes = sorted((Path(root) / "nodes").iterdir())[:LOST_NODES]
    pids = {pid for node in nodes if (pid := written_pid(SystemIo(), str(node))) is not None}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for node in nodes:
        shutil.rmtree(node)


if __name__ == "__main__":
    sys.exit(main())
