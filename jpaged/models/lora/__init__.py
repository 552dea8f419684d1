"""LoRA adapters, as models use them.

targets.py   the matrices that may have adapters, and the layout of an adapter next to each
"""

from jpaged.models.lora.targets import AdaptedPlace, HostAdapter, adapted_places, get_output_path, is_of_experts

__all__ = ["AdaptedPlace", "HostAdapter", "adapted_places", "get_output_path", "is_of_experts"]
