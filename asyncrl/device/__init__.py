"""The accelerator of a process: CUDA, ROCm (under CUDA's names), XPU or Ascend. No other room names one."""
