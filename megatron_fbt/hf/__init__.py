"""Exchange with Hugging Face transformers.

Importing this package makes model_type "fbt" known to transformers' Auto classes, so that exported folders load without
trust_remote_code. A model saved again (save_pretrained) brings its code with it, as an export does.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_fbt.hf.configuration_fbt import FBTConfig
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM, FBTModel

AutoConfig.register(FBTConfig.model_type, FBTConfig, exist_ok=True)
AutoModel.register(FBTConfig, FBTModel, exist_ok=True)
AutoModelForCausalLM.register(FBTConfig, FBTForCausalLM, exist_ok=True)
FBTConfig.register_for_auto_class("AutoConfig")
FBTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
