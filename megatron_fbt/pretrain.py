"""Train a Full-Bandwidth Transformer: torchrun … -m megatron_fbt.pretrain --config FILE [--section.field value …]."""

import logging
import os
import sys
from pathlib import Path
from typing import List, Optional

from megatron_fbt.config.checks import resolve_world_size, validate_config
from megatron_fbt.config.dry_run import check_vocab_size, run_dry
from megatron_fbt.config.load import dump_yaml, parse_command_line
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import FBTError
from megatron_fbt.versions import check_megatron_core_version


def main(argv: Optional[List[str]] = None) -> int:
    """Parse, check, train; returns the exit code (see megatron_fbt.errors)."""
    rank = int(os.environ.get("RANK", 0))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    try:
        config, options = parse_command_line(sys.argv[1:] if argv is None else argv)
        if options.dry_run:
            run_dry(config, options)
        else:
            train(config, is_main=rank == 0)
    except FBTError as error:
        if rank == 0 or getattr(error, "on_every_rank", False):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def train(config: PretrainConfig, is_main: bool) -> None:
    """Run the training that a configuration describes, on this rank."""
    check_megatron_core_version()
    world_size = resolve_world_size(config, os.environ, dry_run=False)
    validate_config(config, world_size)
    from megatron_fbt.data.tokenizer import build_tokenizer
    from megatron_fbt.training.session import run_session

    tokenizer = build_tokenizer(config.data.tokenizer)
    config.model.vocab_size = check_vocab_size(config, tokenizer.vocab_size)
    plan = make_plan(config, world_size, config.model.vocab_size)
    if is_main:
        print(plan.describe(), flush=True)
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        (Path(config.run.dir) / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    run_session(config, plan, tokenizer, is_main)


if __name__ == "__main__":
    sys.exit(main())
