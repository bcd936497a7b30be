"""Hide vLLM from TRL's trainers; ``warm`` imports this module before them.

TRL imports an installed vLLM. Here, vLLM lacks its requirements: ``test_changes_in_vllm.py`` reads
only one of its files.
"""

from trl import import_utils

import_utils.is_vllm_available = lambda min_version=None: False
