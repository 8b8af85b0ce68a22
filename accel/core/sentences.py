"""The English sentence of every reason. Words decide nothing, so this file is not in the key of saved graphs."""

_A_CALL = {
    "autocast": "autocast is on, and compiled graphs keep their own types",
    "gradients": "gradients are requested, and compiled graphs give none",
    "transformed": "torch.func takes its derivative or batches it, and compiled graphs can do neither",
    "weights_elsewhere": "its weights are partly on {device}, its inputs are not",
    "weights_not_taken": "its streamed weights could not be loaded for this call: {error}",
    "weights_too_large": "it needs {megabytes} MB of streamed weights at once, too much for the device",
    "unsupported_argument": "it is called with {what}",
    "stored_otherwise": "how a weight is stored ({type}) changed during the run",
    "changes_shared_memory": "it changes an argument that shares memory with another",
    "reads_option": "it reads {option} from the per-call options",
    "patched": "another node patches it ({patch})",
    "attention_replaced": "another node replaces its attention ({patch})",
}

_A_MACHINE = {
    "torch_lacks": "torch {torch} lacks {name}, which compiling needs: use torch 2.10 to 2.15",
    "no_cpp_compiler": "torch needs a C++ compiler for the CPU, and {name} was not found. Install it: {command}",
    "no_triton": "torch needs Triton for the GPU, and it is not installed; this installs it: {command}",
    "no_triton_of_torch": "torch needs Triton for the GPU, and it is not installed: install torch again from where it "
    "came, with the Triton that belongs to it",
    "no_python_headers": "Triton needs Python's folders include and libs, and there is no {file} in {folder}: copy "
    "both from a Python {python} of python.org",
}

_A_GRAPH = {
    "changes_list": "it may change a list or dict it is given, and a graph would change a copy",
    "compile_failed": "{error}",
    "interrupted": "interrupted",
    "compiling_beside": "its code is still being compiled, beside the image",
    "code_changes": "another extension keeps replacing its code, or what PyTorch's functions do, during the run",
    "part_changed": "another extension has changed a part of it, and it cannot be compiled around that",
    "changes_own": "it changes weights or buffers of its own",
    "keeps_state": "its code keeps {place} from one call to the next",
    "others_may_keep": "code of another extension in it may keep something from one call to the next",
    "untraceable": "torch cannot trace {what}, which {function} ({owner}) uses",
    "code_unread": "it runs {function} ({file}), which the analysis of its code did not find, so changes there would "
    "go unnoticed",
    "read_unwatched": "its code reads {place} in a way that the analysis of its code did not find, so changes there "
    "would go unnoticed",
    "no_graph_fits": "none of its {graphs} graphs fits this call",
    "cache_entries_full": "the graph cache is full: all block types that it may hold ({kinds}) are in use",
    "cache_bytes_full": "the graphs of this run need more than the memory limit of {megabytes} MB",
    "graph_failed": "its compiled graph failed: {error}",
    "failed_beside_graph": "a call of it failed, through no fault of its compiled graph: {error}. The next run uses "
    "the graph again",
    "wrong_output": "its compiled output differs from the uncompiled one {times} times as much as rounding explains",
    "slower": "slower at this size ({compiled} ms a call compiled, {eager} uncompiled)",
    "host_bound": "its steps wait for Python ({compiled} ms a step compiled, {normal} uncompiled)",
    "host_bound_without_graphs": "{slow}. CUDA graphs would save most of that, and need another memory allocator",
}

_A_MODEL = {
    "forward_replaced": "another extension has replaced its forward",
    "indescribable": "it cannot be compiled as it is: {what}",
    "too_few_blocks": "the model has fewer than {least} blocks like it",
    "no_block_runs": "its {part} runs no repeated block that can be compiled",
    "no_blocks": "it has no repeated blocks that can be compiled",
    "compiled_already": "all or part of it is already compiled as a whole",
    "compiled_around": "another node compiles the model, or parts of it, with torch.compile, and Accel leaves it to "
    "that: remove one of the two nodes",
    "no_network": "it has no network that can be compiled",
    "settings_change": "its settings change on every call",
    "layers_offloaded": "its weights are moved to the device part by part (sequential CPU offload, group offloading)",
    "attentions_asked": "its attention weights are requested, and compiled blocks return none",
}

_ADDED_WEIGHTS = {
    "layer_wrapped": "its {layer} {how}",
    "not_addable": "what is added to its weights cannot be added while it runs compiled: {why}",
    "lora_changed": "another extension changes a layer's LoRA",
}

_CAPTURING = {
    "not_captured": "not captured as a CUDA graph: {why}",
    "memory_needed": "the memory of its captures is needed elsewhere during this run",
    "captures_full": "the captured calls of this run need {needed} MB, more than their limit of {room} MB",
    "memory_short": "memory is short: {error}",
    "memory_planned": "{by} plans the memory of its calls, and moves it from call to call",
    "weights_streamed": "not all of its weights can stay on the device beside a CUDA graph",
    "weights_patched": "its weights are patched again on each call",
    "weights_type": "its weights are of the type {type}",
    "tensors_on_devices": "its weights and inputs are on {devices}",
    "no_tensors": "it is called without tensors",
    "not_cuda": "CUDA graphs need an NVIDIA card, and the model runs on {device}",
    "cuda_malloc_async": "torch allocates with cudaMallocAsync, whose memory no CUDA graph can keep",
    "captured_around": "another CUDA graph or stream is around it",
    "device_busy": "the graphics card is at work all the time, so a CUDA graph would save nothing",
    "training": "it is being trained",
    "hooks_everywhere": "another extension has hooks on all modules",
    "code_replaced": "code of another extension runs in {where}",
    "attention_runs": "its attention function ({function}) is not known to work in a CUDA graph",
    "model_changes": "its weights or its code change from call to call",
    "random": "it draws random numbers ({operator})",
    "host_values": "values pass between the CPU and the device during a call ({operator})",
    "lasting_tensors": "it keeps or changes tensors from one call to the next ({operator})",
    "capture_failed": "its CUDA graph failed: {error}",
    "replay_differs": "its replay differs from the call itself {times} times as much as rounding explains",
}

_SAVED = {
    "saved_unmeasured": "Nothing of this run was measured.",
    "compiling_unused": "No compiled block ran.",
    "compiling_traced": "Compiling saves nothing here: the backend eager traces blocks and runs them uncompiled.",
    "compiling_unsure": "How much compiling saved is not known: too few calls were timed.",
    "compiling_unmeasured": "How much compiling saved is not measured: timing is off.",
    "compiling_saved": "Compiling: an estimate. In their first calls blocks were timed on this machine, compiled and "
    "uncompiled, and those times were applied to this run's calls, size by size.",
    "skipping_unused": "DeepCache skipped no step.",
    "skipping_unsure": "How much DeepCache saved is not known: this run had too few steps to compare.",
    "skipping_saved": "DeepCache: the median time of a full step, minus that of a skipped one, times the number "
    "skipped. The first and last step, and any that compiled something, are left out.",
}

_LINE = {
    "line_image": "{quality} {size}",
    "line_size": "{size}",
    "line_times": "about {times}×",
    "line_saved": "about {seconds} s saved",
    "line_later": "later images about {times}×, {seconds} s saved",
    "line_equal": "no faster than without Accel",
    "line_slower": "about {seconds} s slower than without Accel",
    "line_stopped": "stopped after {done} of {steps} steps",
    "line_compiled": "compiled once in {seconds} s",
    "line_traced_once": "traced once in {seconds} s",
    "line_captured": "CUDA graphs captured in {seconds} s",
    "line_surveyed": "model examined in {seconds} s",
    "line_compared": "compared with the plain model in {seconds} s",
    "line_paid_back": "pays off after {images} more images",
    "line_unmeasured": "gain known after the next image",
    "line_loaded": "compiled graphs loaded from disk in {seconds} s",
    "line_traced": "traced but uncompiled (backend eager)",
    "line_partly": "{share} of the calls uncompiled: {why}",
    "line_not_compiled": "not compiled: {why}",
    "line_skipped": "{skipped} of {steps} steps skipped",
    "line_quality": "{share} of the work skipped, planned for {asked} dB",
    "line_none_skipped": "no step skipped: {why}",
    "few_steps": "with so few, each changes too much",
    "steps_differ": "too much changed between them",
}
"""Parts of the line on a node."""

LOADED_IN_PART = "the model is loaded in part"

SENTENCES = {**_A_CALL, **_A_MACHINE, **_A_GRAPH, **_A_MODEL, **_ADDED_WEIGHTS, **_CAPTURING, **_SAVED, **_LINE}
"""Every code with its English sentence. `accelReasons` of locales/zh/main.json has the same codes in Chinese. A host
replaces a sentence where it can say what to do in its own terms."""


def count_nouns(number: int, noun: str) -> str:
    """A number of things: 1 graph, 2 graphs."""
    return f"{number} {noun}{'s' * (number != 1)}"


OF_THE_MACHINE = frozenset(_A_MACHINE)
"""Codes of what is missing for every block alike."""

EXPECTED = frozenset({"slower", "host_bound", "interrupted", "device_busy", "compiling_beside"})
"""Codes of what is as it should be: nobody is to be warned of it."""

OF_OTHERS = frozenset({"compiled_already", "compiled_around"})
"""Codes of what others compile: it ran as they have it."""

OF_CUDA_GRAPHS = frozenset({"not_captured"})
"""Codes of what keeps a call of the model from being captured; its blocks run compiled all the same."""
