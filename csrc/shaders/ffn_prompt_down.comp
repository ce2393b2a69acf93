// Down by neuron for prompt rows, from rows of blocks: ffn_prompt_down.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn_prompt_down.glsl"
