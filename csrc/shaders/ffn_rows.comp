// Dot products of weight rows with the rows of a tile: ffn_rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn_rows.glsl"
