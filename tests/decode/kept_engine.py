"""An engine in a process of its own, which keeps its programs: python -m tests.decode.kept_engine
FOLDER DEVICES COMPILATION [traceless]. It prints the tokens, and the programs that XLA compiled.

traceless: each trace of a round or a prefill raises.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import EngineConfig
from jaxspec.decode import programs
from jaxspec.loading import executables
from tests.support.compilations import counting_compilations
from tests.support.tiny import agreeing_model, random_prompts


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("traced")


def main(folder: str, devices: str, compilation: str, traceless: str = "") -> None:
    executables.keep_in(Path(folder))
    if traceless:
        for program in (programs.prefill_program, programs.round_program, programs.verify_program):
            program.function = forbidden
        make = programs.draft_part_program

        def traceless_part(part: Any) -> programs.Program:
            program = make(part)
            program.function = forbidden
            return program

        programs.draft_part_program = traceless_part
    model = agreeing_model("eagle3")
    llm = LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method="eagle3", num_speculative_tokens=2),
        config=EngineConfig(
            max_model_len=64,
            max_num_seqs=2,
            block_size=16,
            compilation=compilation,  # type: ignore[arg-type]
            tensor_parallel_size=int(devices),
        ),
    )
    params = SamplingParams(1.0, min_p=0.1, min_tokens=2, seed=3, max_tokens=9)
    with counting_compilations() as compiled:
        for _ in range(2):
            [result] = llm.generate(random_prompts((5,)), params)
            print(result.outputs[0].token_ids)
    print(sorted({name for name in compiled if "prefill" in name or "round" in name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
