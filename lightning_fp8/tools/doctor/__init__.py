"""What this machine has, which precisions run on it and on which kernels, and what to install or change."""

from lightning_fp8.tools.doctor.diagnosis import Diagnosis, KernelCheck, Problem, Section
from lightning_fp8.tools.doctor.examination import examine

__all__ = ["Diagnosis", "KernelCheck", "Problem", "Section", "examine"]
