// Down by neuron for prompt rows, from panels: ffn_prompt_down.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#define PANELS
#include "ffn_prompt_down.glsl"
