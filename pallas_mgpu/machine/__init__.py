"""The emulated machine: generated CUDA programs, run on the CPU.

C++ of its own, compiled by g++ when it is first needed, against which the text of a program is
built unchanged: SMEM and GMEM of which every byte knows who wrote and read it, mbarriers, TMA,
wgmma, and a scheduler of threads with a seed (machine.h). It is written from the PTX ISA and shares
no table, header or text with what generates programs, or interprets graphs, so that each judges the
other."""
