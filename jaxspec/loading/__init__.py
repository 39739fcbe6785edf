"""From a name to arrays: folders, safetensors, GGUF, tokenizers.

resolve             a folder, file, name or hub id -> a local checkpoint folder
same_vocabulary     whether a target and an independent draft have one vocabulary
pair                names of a target and a head, which may name its target -> folders
default_target      SmolLM2-135M-Instruct, fetched and converted once (a program: prints the folder)
cache               the cache folder, safe against two processes at once
compilation_cache   compiled programs kept on disk between runs
program_names       names of rounds and prefills, which need no trace
executables         those programs on disk, found by their names
gguf_file           llama.cpp's GGUF -> a Hugging Face folder
gguf_header         the header of a GGUF, checked against the file
gguf_metadata       its values, of types that are checked
gguf_tokenizer      a GGUF's metadata -> tokenizer.json
gguf_sentencepiece  the tokenizer of a SentencePiece vocabulary
shards              safetensors files, one or several with an index
new_folder          a folder of new files, which appears whole or not at all
new_file            the same of a single file
conversion          a checkpoint of plain weights -> a quantised one
head_conversion     a draft head of plain weights -> one in float8, and back
checkpoint          an opened folder: config.json and lazily read tensors
fp8                 blocks of float8 -> plain tensors, where no product reads the codes
quantized_tensors   the tensors of a quantised checkpoint, as tables name them
card                what a checkpoint's README.md names as its base model
weight_checks       weights that no model can have
weights             tensors -> a pytree of jax arrays, strictly
binding             a draft's weights -> those bound to a target, whose weights they share
model               a folder -> a target, or a draft bound to its target
chat                chats as callers write them, and as templates read them
template_limits     time and size of a chat template's rendering
generation_config   the sampling parameters that a target's makers propose
tokenizer           text and chats to token ids and back
placement           the devices of an engine, and weights that go from one to all of them
pretrained          target, draft, tokenizer and settings together, for LLM.from_pretrained
"""

from jaxspec.loading.cache import cache_dir, keep_compiled_programs
from jaxspec.loading.checkpoint import Checkpoint, LazyTensor, open_checkpoint, read_json
from jaxspec.loading.resolve import resolve
from jaxspec.loading.tokenizer import Tokenizer, load_tokenizer
from jaxspec.loading.weights import check_shapes, load_params

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "Tokenizer",
    "cache_dir",
    "check_shapes",
    "keep_compiled_programs",
    "load_params",
    "load_tokenizer",
    "open_checkpoint",
    "read_json",
    "resolve",
]
