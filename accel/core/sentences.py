"""The English sentence of every reason. Words decide nothing, so this file is not in the key of saved graphs."""

_A_CALL = {
    "autocast": "autocast is on, and a graph computes in the types that it was made for",
    "gradients": "gradients are requested, and a graph gives none",
    "weights_elsewhere": "its weights are partly on {device}, its inputs are not",
    "weights_not_taken": "its weights, which are brought for each call, could not be taken for its graph: {error}",
    "weights_too_large": "{megabytes} MB of its weights would have to be brought at once, too much for the device",
    "unsupported_argument": "it is called with {what}",
    "stored_otherwise": "a weight is stored as another {type} than when the run began",
    "changes_shared_memory": "it changes an argument that shares memory with another",
    "reads_option": "it reads {option} from the per-call options",
    "attention_override": "an extension overrides attention for this run",
    "patched": "a patch ({patch}) concerns it",
    "attention_replaced": "an attention replacement ({patch}) concerns it",
}

_A_MACHINE = {
    "torch_lacks": "torch {torch} has no {name}, without which nothing is compiled: torch 2.7 to 2.15 have it",
    "no_cpp_compiler": "torch needs a C++ compiler for the CPU, and there is no {name}; this installs one: {command}",
    "cpp_compiler_asleep": "torch needs a C++ compiler for the CPU, and {name} is installed but not on the path: in a "
    "command prompt run {command}, and start from there",
    "no_triton": "torch needs Triton for the GPU, and it is not installed; this installs it: {command}",
    "no_triton_of_torch": "torch needs Triton for the GPU, and it is not installed: install torch again from where it "
    "came, with the Triton that belongs to it",
    "no_python_headers": "Triton needs Python's folders include and libs, and there is no Python.h in {folder}: copy "
    "both from a Python {python} of python.org",
}

_A_GRAPH = {
    "changes_list": "it changes a list or dict that it is given, or may do so; a graph would change a copy",
    "not_copied": "it cannot be copied: {error}",
    "compile_failed": "{error}",
    "compile_out_of_memory": "out of memory while compiling: {error}",
    "interrupted": "interrupted",
    "no_graph_fits": "none of its {graphs} graphs fits this call",
    "cache_entries_full": "the graph cache may hold {kinds} kinds, and as many are in use",
    "cache_bytes_full": "the graphs of this run need more than the {megabytes} MB that they may keep",
    "graph_failed": "its compiled graph failed: {error}",
    "wrong_output": "its compiled output differs from the eager one by {difference} of the largest value",
    "slower": "compiled {compiled} ms, normal {eager} ms a call at this size: kept normal",
}

_A_MODEL = {
    "forward_replaced": "another extension has replaced its forward",
    "indescribable": "{what}",
    "too_few_blocks": "fewer than {least} blocks of its kind",
    "no_blocks": "it has no repeated blocks",
    "no_block_compilable": "no repeated block of it can be compiled",
    "no_block_runs": "no repeated block that can be compiled runs in its {part}",
    "compiled_already": "it or a part of it is compiled as a whole already",
    "compiled_by_others": "it or a part of it is compiled by somebody else already",
    "compiled_whole_by_others": "it is compiled as a whole by somebody else",
    "network_compiled_already": "its network or a part of it is compiled as a whole already",
    "no_network": "it holds no network as {names}",
    "odd_network": "its network is a {type}",
    "settings_change": "its settings change at every call",
    "layers_offloaded": "its weights are moved to the device layer by layer (sequential CPU offload)",
    "attentions_asked": "it is asked for its attention weights, which compiled blocks do not hand out",
    "groups_offloaded": "its weights are moved to the device group by group (group offloading)",
}

_ADDED_WEIGHTS = {
    "layer_replaced": "its {layer} was replaced after it was surveyed",
    "layer_wrapped_twice": "its {layer} is wrapped in two ways",
    "wrapped_layer_read": "its {layer} is wrapped, and {reader} reads weights of its parts",
    "wrapped_weight_shared": "a {layer} in it is wrapped, and its weight is used elsewhere too",
    "added_to_no_bias": "something is added to the bias of a layer that has none",
    "added_to_gaps": "something is added to a weight that has gaps in memory",
    "nothing_addable": "nothing can be added to its weights: {error}",
    "lora_changed": "a layer's LoRA is changed by somebody else",
    "lora_unmerging": "merged LoRA is being taken out of its weights",
    "lora_dropout": "its LoRA leaves something out at random",
    "adapter_unknown": "an adapter ({adapter}) does more than to add to its layer's weight",
    "lora_layer_odd": "a LoRA is around a {layer}, which is no plain {plain}",
    "lora_layer_grouped": "a LoRA is around a convolution in groups",
    "lora_layer_type": "a LoRA is around a layer of {type}s of {dtype}",
    "lora_variant": "its LoRA {lora} is of another type ({variant})",
    "lora_not_plain": "its LoRA {lora} is not of plain layers",
    "lora_types": "its LoRA {lora} is of {down} and {up}",
    "lora_bias": "its LoRA {lora} has a bias, and its layer has none",
    "lora_geometry": "its LoRA {lora} slides over the image in another way than its layer",
}

_CAPTURING = {
    "not_captured": "not captured as a CUDA graph: {why}",
    "in_module": "{module}: {why}",
    "training": "it is being trained",
    "hooks_everywhere": "somebody's hooks are on all modules",
    "hooked": "somebody's hook is on {module}",
    "code_replaced": "another extension has replaced code of {module}",
    "code_unknown": "its code cannot be analysed: {what}",
    "patch_runs": "a patch ({patch}) runs its own code in each call",
    "memory_needed": "the memory of its captures is needed elsewhere during the run",
    "loaded_in_part": "it is loaded in part, and its other weights come and go",
    "weights_streamed": "its weights are streamed (dynamic VRAM), unless the setting Keep weights in place is on",
    "memory_planned": "{by} plans the memory of its calls, and moves it from call to call",
    "hooks_on_weights": "hooks change its weights during the run",
    "code_injected": "an extension puts its own code into the model for each run",
    "weights_patched": "its weights are patched again in each call",
    "compiled_whole": "it is compiled as a whole already",
    "weights_type": "its weights are of the type {type}",
    "weights_on_devices": "its weights are on {devices}",
    "tensors_on_devices": "its weights and inputs are on {devices}",
    "no_tensors": "it is called without tensors",
    "odd_tensor": "it is called with a {type}",
    "model_changes": "its weights or its code change from call to call",
    "not_cuda": "there are CUDA graphs for CUDA devices alone, and the model runs on {device}",
    "amd": "CUDA graphs are not used on AMD's cards",
    "cuda_malloc_async": "torch allocates with cudaMallocAsync: start with --disable-cuda-malloc for CUDA graphs",
    "captured_around": "somebody else's CUDA graph is being captured around it",
    "other_stream": "it runs on another CUDA stream than the calls before it",
    "device_unsure": "its device does not say whether it can: {error}",
    "python_random": "Python's random numbers are drawn inside",
    "random": "random numbers are drawn inside ({operator})",
    "moves_tensor": "it moves a tensor from {here} to {there} ({operator})",
    "waits": "the CPU waits for a value of the device inside ({operator})",
    "makes_constant": "it makes a tensor of Python's values ({operator})",
    "takes_from_device": "it takes a tensor on {device} ({operator})",
    "reads_foreign": "it reads a tensor that is neither a weight nor an input ({operator})",
    "writes_own": "it writes to its inputs or weights ({operator})",
    "dry_run_failed": "its dry run failed: {error}",
    "weights_moved": "its weights were moved while it was captured",
    "replay_differs": "its replay differs from the call itself by {difference} of the largest value",
    "capture_failed": "capturing it failed: {error}",
    "replay_failed": "its replay failed: {error}",
    "model_gone": "its model is gone",
    "memory_short": "memory is short: {error}",
    "captures_full": "the captured calls of this run need {needed} MB, more than the {room} MB that they may keep",
}

_SAVED = {
    "saved_unmeasured": "Nothing of this run was measured.",
    "compiling_unused": "No compiled block ran.",
    "compiling_unsure": "What compiling saved is not known: too few calls were run both ways yet.",
    "compiling_unmeasured": "What compiling saved is not known: comparing is off, so no call was run both ways.",
    "compiling_saved": "Compiling: the median time of a block's call, uncompiled less compiled, times its calls; "
    "both were measured on this machine. The time to compile is not taken off.",
    "compiling_saved_in_part": "Compiling: the median time of a block's call, uncompiled less compiled, times its "
    "calls ({covered} of {calls} calls; the others are not counted); both were measured on this machine. The time to "
    "compile is not taken off.",
    "both_samplings": "{first} {second}",
    "skipping_unused": "DeepCache skipped no step.",
    "skipping_untimed": "What DeepCache saved is not known: the steps of this run were not timed.",
    "skipping_unsure": "What DeepCache saved is not known: too few steps of this run could be compared.",
    "skipping_saved": "DeepCache: {steps} skipped steps of {skipped} s each, beside {full} s for a full one (medians "
    "of this run, without its first and last step and those in which something was compiled).",
}

_LINE = {
    "line_times": "{times}×",
    "line_saved": "{seconds} s saved",
    "line_equal": "as fast as without",
    "line_slower": "{seconds} s slower than without",
    "line_compiled": "compiled once in {seconds} s",
    "line_paid_back": "paid back after {images} images",
    "line_unmeasured": "gain known after the next image",
    "line_loaded": "compiled graphs loaded from disk",
    "line_not_compiled": "not compiled: {why}",
    "line_skipped": "{skipped} of {steps} steps skipped",
    "line_paid_back_at_once": "paid back at once",
    "line_all_full": "no step skipped: {why}",
    "line_few_steps": "too few steps to skip any",
    "line_none_skipped": "no step skipped: too much changes between them",
}
"""Parts of the line on a node."""

SENTENCES = {**_A_CALL, **_A_MACHINE, **_A_GRAPH, **_A_MODEL, **_ADDED_WEIGHTS, **_CAPTURING, **_SAVED, **_LINE}
"""Every code with its English sentence. `accelReasons` of locales/zh/main.json has the same codes in Chinese."""

OF_THE_MACHINE = frozenset(_A_MACHINE)
"""Codes of what is missing for every block alike."""

OF_CUDA_GRAPHS = frozenset({"not_captured"})
"""Codes of what keeps a call of the model from being captured; its blocks run compiled all the same."""
