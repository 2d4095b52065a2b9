"""ONNX: conversion by packages of its own, and running with ONNX Runtime."""
